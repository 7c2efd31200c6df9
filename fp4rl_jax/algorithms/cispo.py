"""CISPO (arXiv 2506.13585): the ratio is clipped and detached, so that no token loses its gradient.

    A = (r - mean) / (std + eps) over the group
    loss = mean over all tokens of -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi w

The paper sets no lower bound (clip_low = 1) and tunes the upper one without stating it; 4 (a
weight of at most 5) is this project's default.
"""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.objectives import policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.NormalizedConfig):
    """CISPO's settings: the weight stays in [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 1.0
    clip_high: float = 4.0


def _by_token(trainer_logprobs: Array, batch: TrainBatch, config: Config) -> _common.TokenLoss:
    ratio = _common.token_ratio(trainer_logprobs, batch)
    kept_logprobs = jnp.where(batch.loss_mask, trainer_logprobs, 0.0)
    token_loss, clipped = policy.weighted_log_likelihood(
        kept_logprobs, ratio, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
    )
    return _common.TokenLoss(token_loss, ratio, clipped)


validate = _common.validate_group
prepare = _common.prepare_with(_common.group_normalized, validate=validate)
loss = _common.loss_with(_by_token, mean=_common.token_mean)
wanted = _common.keep_all
