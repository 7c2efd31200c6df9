"""Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.

    A = r - mean over the group                      (no division by the standard deviation)
    loss = mean over sequences of [sum over tokens of -min(rho A, clip(rho, 1 -+ clip) A) w] / length

`length` is one constant, the maximum completion length, so long wrong answers are not favoured.
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
    """Dr.GRPO's settings.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
        length: the constant; None takes the completion width of the batch, i.e. the configured
            maximum number of new tokens.
        kl_coef: weight of the KL term to a frozen reference, loss per nat; 0 needs no reference.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    length: int | None = None
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _common.require_positive(clip_low=self.clip_low, clip_high=self.clip_high)
        _common.require_positive(length=1 if self.length is None else self.length)
        _common.require_not_negative(kl_coef=self.kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` must be given ref_logprobs."""
        return self.kl_coef > 0


def validate(config: Config, *, group_size: int) -> None:
    """Raises ValueError: the baseline is the group, a group of one has none."""
    del config
    _common.require_group("dr_grpo", group_size)


def prepare(
    rollouts: Rollouts, rewards: Array, config: Config, *, ref_logprobs: Array | None = None
) -> TrainBatch:
    """Rollouts and rewards [B] to a batch with advantages [B]; see `_common.checked_rewards`."""
    validate(config, group_size=rollouts.group_size)
    rewards = _common.checked_rewards(rewards, rollouts)
    centered = advantages.group_centered(rewards, group_size=rollouts.group_size)
    return _common.train_batch(rollouts, centered, ref_logprobs)


def loss(trainer_logprobs: Array, batch: TrainBatch, weights: Array, config: Config) -> _common.Loss:
    """Policy loss from [B, T] float32 log-probs; `weights` [B, T] are the correction's, detached."""
    _common.check_loss_inputs(trainer_logprobs, batch, weights)
    ratio = jnp.exp(policy.log_ratio(trainer_logprobs, batch.old_logprobs, batch.loss_mask))
    token_loss, clipped = policy.clipped_surrogate(
        ratio, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
    )
    token_loss = token_loss * jax.lax.stop_gradient(weights)
    token_loss = _common.with_ref_kl(token_loss, trainer_logprobs, batch, kl_coef=config.kl_coef)
    length = _common.completion_width(batch) if config.length is None else config.length
    sums = _common.reduced(token_loss, batch, mean="sequences", length=length)
    return _common.make_loss(sums, trainer_logprobs, batch, ratio=ratio, clipped=clipped)


def wanted(rewards: Array, config: Config) -> Array:
    """[P] bool: every group is kept."""
    del config
    return _common.all_groups(rewards)
