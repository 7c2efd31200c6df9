"""RLOO (arXiv 2402.14740): the baseline of a completion is the mean reward of its group's others.

    A_i = r_i - mean of r_j, j != i
    loss = mean over sequences of sum over tokens of -rho A w

REINFORCE on whole sequences: no clip, and a sequence's loss is the sum over its tokens. With
`old_logprobs` (more than one update of a rollout) rho corrects each token; at the first it is 1.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import advantages, policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """RLOO's settings.

    Attributes:
        kl_coef: weight of the KL term to a frozen reference, loss per nat; 0 needs no reference.
    """

    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _common.require_not_negative(kl_coef=self.kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` must be given ref_logprobs."""
        return self.kl_coef > 0


def validate(config: Config, *, group_size: int) -> None:
    """Raises ValueError: the baseline is the group, a group of one has none."""
    del config
    _common.require_group("rloo", group_size)


def prepare(
    rollouts: Rollouts, rewards: Array, config: Config, *, ref_logprobs: Array | None = None
) -> TrainBatch:
    """Rollouts and rewards [B] to a batch with advantages [B]; see `_common.checked_rewards`."""
    validate(config, group_size=rollouts.group_size)
    rewards = _common.checked_rewards(rewards, rollouts)
    against_others = advantages.leave_one_out(rewards, group_size=rollouts.group_size)
    return _common.train_batch(rollouts, against_others, ref_logprobs)


def loss(trainer_logprobs: Array, batch: TrainBatch, weights: Array, config: Config) -> _common.Loss:
    """Policy loss from [B, T] float32 log-probs; `weights` [B, T] are the correction's, detached."""
    _common.check_loss_inputs(trainer_logprobs, batch, weights)
    ratio = jnp.exp(policy.log_ratio(trainer_logprobs, batch.old_logprobs, batch.loss_mask))
    token_loss = -ratio * batch.advantages[:, None] * jax.lax.stop_gradient(weights)
    token_loss = _common.with_ref_kl(token_loss, trainer_logprobs, batch, kl_coef=config.kl_coef)
    sums = _common.reduced(token_loss, batch, mean="sequences", length=1)
    clipped = jnp.zeros_like(batch.loss_mask)
    return _common.make_loss(sums, trainer_logprobs, batch, ratio=ratio, clipped=clipped)


def wanted(rewards: Array, config: Config) -> Array:
    """[P] bool: every group is kept."""
    del config
    return _common.all_groups(rewards)
