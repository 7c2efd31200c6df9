"""Truncated importance sampling (Yao et al., 2025): w = min(exp(log_ratio), cap), per token."""

import dataclasses
import math

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.corrections import _common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """TIS's settings.

    Attributes:
        cap: the largest weight; 2 is the usual default, 5 is used by FP4 papers.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cap) and self.cap >= 1):
            raise ValueError(f"cap is {self.cap}, expected a finite number of at least 1")


def weights(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] float32: min(ratio, cap) on the mask, 0 off it, without gradient."""
    ratio = jnp.exp(_common.detached(log_ratio, loss_mask))
    return jnp.where(loss_mask, jnp.minimum(ratio, config.cap), 0.0)


def clipped(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] bool: tokens whose ratio is above the cap."""
    return loss_mask & (jnp.exp(_common.detached(log_ratio, loss_mask)) > config.cap)
