"""Roundings that carry meaning, and reductions whose order is written down."""

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from fp4rl_jax.arrays import Array


def round_to(x: Array, dtype: jnp.dtype) -> Array:
    """Rounds float32 values to `dtype` and keeps them in float32.

    `reduce_precision` and not a pair of casts: XLA on a GPU folds the pair away.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x


def tree_sum(x: Array) -> Array:
    """Sums the last axis by halving, in an order that depends on its length only.

    Args:
        x: [..., n] float32; zeros pad it to a power of two.

    Returns:
        [...] float32.
    """
    size = x.shape[-1]
    padded = 1 << max(size - 1, 0).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - size)])
    x = optimization_barrier(x)  # or the first addition contracts with a product in x to an FMA
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return optimization_barrier(x[..., 0])
