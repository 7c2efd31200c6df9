"""DAPO (arXiv 2503.14476): clip-higher, token mean, overlong shaping, dynamic sampling.

    r' = r + overlong_coef * penalty(length)         0 up to L_max - L_cache, then linearly to -1 at L_max
    A = (r' - mean) / (std + eps) over the group
    loss = mean over all tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A) w

L_max is the completion width of the batch, L_cache the share `overlong_share` of it (4096 of
20480 tokens in the paper). `wanted` drops the groups whose rewards (before shaping) are all
equal: the loop samples on until it has the asked number of mixed groups. No KL term by default.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array, check_name
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import advantages, policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """DAPO's settings.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
        std_eps: added to a group's (population) standard deviation, in units of the reward.
        overlong_share: L_cache / L_max, in (0, 1].
        overlong_coef: weight of the penalty, in units of the reward; 0 turns shaping off.
        dynamic_sampling: "on" drops groups without a contrast, "off" keeps every group.
        kl_coef: weight of the KL term to a frozen reference, loss per nat; 0 needs no reference.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    std_eps: float = 1e-6
    overlong_share: float = 0.2
    overlong_coef: float = 1.0
    dynamic_sampling: Literal["on", "off"] = "on"
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _common.require_positive(clip_low=self.clip_low, clip_high=self.clip_high, std_eps=self.std_eps)
        _common.require_not_negative(kl_coef=self.kl_coef, overlong_coef=self.overlong_coef)
        if not 0 < self.overlong_share <= 1:
            raise ValueError(f"overlong_share is {self.overlong_share}, expected 0 < overlong_share <= 1")
        check_name("dynamic_sampling", self.dynamic_sampling, ("on", "off"))

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` must be given ref_logprobs."""
        return self.kl_coef > 0


def validate(config: Config, *, group_size: int) -> None:
    """Raises ValueError: the baseline is the group, a group of one has none."""
    del config
    _common.require_group("dapo", group_size)


def prepare(
    rollouts: Rollouts, rewards: Array, config: Config, *, ref_logprobs: Array | None = None
) -> TrainBatch:
    """Rollouts and rewards [B] to a batch with advantages [B]; see `_common.checked_rewards`."""
    validate(config, group_size=rollouts.group_size)
    rewards = _common.checked_rewards(rewards, rollouts)
    width = _common.completion_width(rollouts)
    penalty = advantages.overlong_penalty(
        jnp.sum(rollouts.loss_mask, axis=1), max_length=width, cache=config.overlong_share * width
    )
    shaped = rewards + config.overlong_coef * penalty
    normalized = advantages.group_normalized(shaped, group_size=rollouts.group_size, eps=config.std_eps)
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
    sums = _common.reduced(token_loss, batch, mean="tokens")
    return _common.make_loss(sums, trainer_logprobs, batch, ratio=ratio, clipped=clipped)


def wanted(rewards: Array, config: Config) -> Array:
    """[P] bool from rewards [P, group_size]: groups whose rewards are not all equal."""
    if config.dynamic_sampling == "off":
        return _common.all_groups(rewards)
    return advantages.mixed_groups(rewards)
