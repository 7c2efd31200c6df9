"""IcePop: a token's ratio is its weight inside a band and 0 outside it (defaults 0.5 and 5)."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.corrections import _common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """IcePop's settings.

    Attributes:
        low, high: tokens whose ratio lies in [low, high] keep it as weight; others weigh 0.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _common.require_band(self.low, self.high)


def weights(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] float32: the ratio inside the band, 0 outside it and off the mask, without gradient."""
    ratio = jnp.exp(_common.detached(log_ratio, loss_mask))
    dropped = clipped(log_ratio, loss_mask, config)
    return jnp.where(loss_mask & ~dropped, ratio, 0.0)


def clipped(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] bool: tokens whose ratio is outside the band."""
    ratio = jnp.exp(_common.detached(log_ratio, loss_mask))
    return loss_mask & ((ratio < config.low) | (ratio > config.high))
