"""Elementwise helpers whose rounding is written down, not left to the compiler."""

from typing import Any

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops import rounding
from fp4rl_jax.ops.spec import Order


def round_to(x: Array, dtype: Any) -> Array:
    """Rounds float32 to `dtype` such that the compiler cannot undo it."""
    return rounding.settle(x, dtype)


def add(x: Array, y: Array) -> Array:
    """x + y in float32, rounded once to x's dtype."""
    return round_to(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def sum_last(x: Array, *, order: Order) -> Array:
    """Sum over the last axis; in the fixed order by an explicit tree."""
    return rounding.tree_sum(x) if order == "fixed" else jnp.sum(x, axis=-1)
