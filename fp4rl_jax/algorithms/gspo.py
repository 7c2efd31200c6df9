"""GSPO (arXiv 2507.18071): the ratio of a whole sequence, length-normalised, is what is clipped.

    s = exp(mean over tokens of (log pi - log pi_old)) of the sequence
    A = (r - mean) / (std + eps) over the group
    loss = mean over sequences of -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)

Written in the paper's token form, s_t = sg(s) * pi_t / sg(pi_t), averaged over the sequence: value
and gradient are those of the sequence form, and per-token correction weights apply.
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
    """GSPO's settings.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
        std_eps: added to a group's (population) standard deviation, in units of the reward.
        kl_coef: weight of the KL term to a frozen reference, loss per nat; 0 needs no reference.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
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
    _common.require_group("gspo", group_size)


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
    token_log_ratio = policy.log_ratio(trainer_logprobs, batch.old_logprobs, batch.loss_mask)
    ratio = jnp.exp(policy.sequence_log_ratio(token_log_ratio, batch.loss_mask))
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
