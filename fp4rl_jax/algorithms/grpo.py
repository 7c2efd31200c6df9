"""GRPO (arXiv 2402.03300): group-normalised advantages, clipped ratio, mean per sequence.

    A = (r - mean) / (std + eps) over the group
    loss = mean over sequences of mean over tokens of [-min(rho A, clip(rho, 1 -+ clip) A) w + kl_coef k3]

At the first update of a rollout the *value* of the loss is 0 by construction (rho is 1 and the
advantages of a group sum to zero); the gradient is not.
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
    """GRPO's settings.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
        std_eps: added to a group's (population) standard deviation, in units of the reward.
        kl_coef: weight of the KL term to a frozen reference, loss per nat; 0 needs no reference.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    std_eps: float = 1e-6
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _common.require_positive(clip_low=self.clip_low, clip_high=self.clip_high, std_eps=self.std_eps)
        _common.require_not_negative(kl_coef=self.kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` must be given ref_logprobs."""
        return self.kl_coef > 0


def validate(config: Config, *, group_size: int) -> None:
    """Raises ValueError: the baseline is the group, a group of one has none."""
    del config
    _common.require_group("grpo", group_size)


def prepare(
    rollouts: Rollouts, rewards: Array, config: Config, *, ref_logprobs: Array | None = None
) -> TrainBatch:
    """Rollouts and rewards [B] to a batch with advantages [B]; see `_common.checked_rewards`."""
    validate(config, group_size=rollouts.group_size)
    rewards = _common.checked_rewards(rewards, rollouts)
    normalized = advantages.group_normalized(rewards, group_size=rollouts.group_size, eps=config.std_eps)
    return _common.train_batch(rollouts, normalized, ref_logprobs)


def loss(trainer_logprobs: Array, batch: TrainBatch, weights: Array, config: Config) -> _common.Loss:
    """Policy loss from [B, T] float32 log-probs; `weights` [B, T] are the correction's, detached."""
    _common.check_loss_inputs(trainer_logprobs, batch, weights)
    ratio = jnp.exp(policy.log_ratio(trainer_logprobs, batch.old_logprobs, batch.loss_mask))
    token_loss, clipped = policy.clipped_surrogate(
        ratio, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
    )
    token_loss = token_loss * jax.lax.stop_gradient(weights)
    token_loss = _common.with_ref_kl(token_loss, trainer_logprobs, batch, kl_coef=config.kl_coef)
    sums = _common.reduced(token_loss, batch, mean="sequences")
    return _common.make_loss(sums, trainer_logprobs, batch, ratio=ratio, clipped=clipped)


def wanted(rewards: Array, config: Config) -> Array:
    """[P] bool: every group is kept."""
    del config
    return _common.all_groups(rewards)
