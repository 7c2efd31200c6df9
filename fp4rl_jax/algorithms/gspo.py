"""GSPO (arXiv 2507.18071): the ratio of a whole sequence, length-normalised, is what is clipped.

    s = exp(mean over tokens of (log pi - log pi_old)) of the sequence
    A = (r - mean) / (std + eps) over the group
    loss = mean over sequences of -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)

Written in the paper's token form, s_t = sg(s) * pi_t / sg(pi_t), averaged over the sequence: value
and gradient are those of the sequence form, and per-token correction weights apply.
"""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.objectives import policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.NormalizedConfig):
    """GSPO's settings: the ratio of a whole sequence leaves 1 by little."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4


def _by_token(trainer_logprobs: Array, batch: TrainBatch, config: Config) -> _common.TokenLoss:
    token_log_ratio = policy.log_ratio(trainer_logprobs, batch.old_logprobs, batch.loss_mask)
    ratio = jnp.exp(policy.sequence_log_ratio(token_log_ratio, batch.loss_mask))
    return _common.clipped_surrogate(ratio, batch, config)


validate = _common.validate_group
prepare = _common.prepare_with(_common.group_normalized, validate=validate)
loss = _common.loss_with(_by_token, mean=_common.sequence_mean)
wanted = _common.keep_all
