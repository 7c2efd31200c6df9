"""Sequence mask: a sequence is dropped whole if its geometric-mean ratio leaves a narrow band.

The tokens of a kept sequence weigh their own ratio (token_weight = "ratio", as NeMo-RL and
OpenRLHF do under the name seq-mask-tis) or 1 (token_weight = "one": a pure mask).
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from fp4rl_jax.arrays import Array, check_name
from fp4rl_jax.corrections import _common

TOKEN_WEIGHTS = ("ratio", "one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The sequence mask's settings.

    Attributes:
        low, high: sequences whose exp(mean log_ratio) lies in [low, high] are kept.
        token_weight: what a kept sequence's tokens weigh: their `ratio`, or `one`.
    """

    low: float = 0.999
    high: float = 1.002
    token_weight: Literal["ratio", "one"] = "ratio"

    def __post_init__(self) -> None:
        _common.require_band(self.low, self.high)
        check_name("token_weight", self.token_weight, TOKEN_WEIGHTS)


def weights(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] float32: 0 on dropped sequences and off the mask, without gradient."""
    ratio = jnp.exp(_common.detached(log_ratio, loss_mask))
    kept = loss_mask & ~clipped(log_ratio, loss_mask, config)
    return jnp.where(kept, ratio if config.token_weight == "ratio" else 1.0, 0.0)


def clipped(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] bool: the tokens of dropped sequences."""
    total = jnp.sum(_common.detached(log_ratio, loss_mask), axis=1)
    mean_ratio = jnp.exp(total / jnp.maximum(jnp.sum(loss_mask, axis=1), 1))  # [B]
    outside = (mean_ratio < config.low) | (mean_ratio > config.high)
    return loss_mask & outside[:, None]
