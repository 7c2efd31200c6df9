"""Shared by the correction files: the checked, clamped, detached ratio."""

import chex
import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array

#: Log-ratios are clamped to this many nats on either side before they are exponentiated.
MAX_LOG_RATIO = 20.0


def detached(log_ratio: Array, loss_mask: Array) -> Array:
    """[B, T] float32 log-ratio without gradient, clamped to +-20 nats, 0 off the mask."""
    chex.assert_rank([log_ratio, loss_mask], 2)
    chex.assert_equal_shape([log_ratio, loss_mask])
    chex.assert_type(loss_mask, bool)
    kept = jnp.where(loss_mask, jax.lax.stop_gradient(log_ratio), 0.0).astype(jnp.float32)
    return jnp.clip(kept, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def unweighted(log_ratio: Array, loss_mask: Array, config: object) -> Array:
    """`weights` of a correction without any: [B, T] float32, 1 on the mask, 0 off it."""
    del config
    detached(log_ratio, loss_mask)
    return loss_mask.astype(jnp.float32)


def nothing_clipped(log_ratio: Array, loss_mask: Array, config: object) -> Array:
    """`clipped` of a correction that lets every ratio through: [B, T] bool, False everywhere."""
    del config
    detached(log_ratio, loss_mask)
    return jnp.zeros_like(loss_mask)


def require_band(low: float, high: float) -> None:
    """Raises ValueError unless 0 <= low < high."""
    if not 0 <= low < high:
        raise ValueError(f"band is [{low}, {high}], expected 0 <= low < high")
