"""No correction: every token weighs 1, the mismatch is only measured."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.corrections import _common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Nothing to set."""


def weights(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] float32: 1 on the mask, 0 off it."""
    del config
    _common.detached(log_ratio, loss_mask)
    return loss_mask.astype(jnp.float32)


def clipped(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] bool: False everywhere."""
    del config
    _common.detached(log_ratio, loss_mask)
    return jnp.zeros_like(loss_mask)
