"""REINFORCE++ (arXiv 2501.03262): no group baseline, advantages normalised over the whole batch.

    A = (r' - mean) / (std + eps) over all trained tokens of the batch, r' = r - reward_kl_coef * KL
    loss = mean over all tokens of -min(rho A, clip(rho, 1 -+ clip) A) w

KL is the sequence's sum of (rollout - ref) log-probs, an unbiased estimate of its KL to the
reference; every token of a sequence carries the whole of it (the paper's per-token form lets a
token carry what comes after it). Works with one completion per prompt.
"""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.NormalizedConfig):
    """REINFORCE++'s settings; `std_eps` is added to the standard deviation over the batch.

    Attributes:
        reward_kl_coef: reward per nat of KL to a frozen reference; 0 needs no reference.
    """

    reward_kl_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _common.require_not_negative(reward_kl_coef=self.reward_kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` must be given ref_logprobs."""
        return self.kl_coef > 0 or self.reward_kl_coef > 0


def validate(config: Config, *, group_size: int) -> None:
    """Raises ValueError unless group_size is positive: a prompt needs no second completion."""
    del config
    _common.require_positive(group_size=group_size)


def prepare(
    rollouts: Rollouts, rewards: Array, config: Config, *, ref_logprobs: Array | None = None
) -> TrainBatch:
    """Rollouts and rewards [B] to a batch with advantages [B]; see `_common.checked_rewards`."""
    validate(config, group_size=rollouts.group_size)
    rewards = _common.checked_rewards(rewards, rollouts)
    if config.reward_kl_coef != 0:
        rewards = rewards - config.reward_kl_coef * _sequence_kl(rollouts, ref_logprobs)
    lengths = jnp.sum(rollouts.loss_mask, axis=1)
    normalized = advantages.batch_normalized(rewards, lengths, eps=config.std_eps)
    return _common.train_batch(rollouts, normalized, ref_logprobs)


def _sequence_kl(rollouts: Rollouts, ref_logprobs: Array | None) -> Array:
    """[B] nats."""
    if ref_logprobs is None:
        raise ValueError("reward_kl_coef is not 0 but prepare was given no ref_logprobs")
    return jnp.sum(jnp.where(rollouts.loss_mask, rollouts.rollout_logprobs - ref_logprobs, 0.0), axis=1)


loss = _common.loss_with(_common.surrogate, mean=_common.token_mean)
wanted = _common.keep_all
