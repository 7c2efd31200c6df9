"""Roundings that carry meaning, and reductions whose order is written down."""

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats._base import narrow_exact
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.spec import Order

#: Elements that `pointwise` computes together: whole vectors of every width.
_RUN = 64


def round_to(x: Array, dtype: jnp.dtype) -> Array:
    """Rounds float32 values to `dtype` and keeps them in float32.

    `reduce_precision` and not a pair of casts: XLA on a GPU folds the pair away.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x


def settle(x: Array, dtype: jnp.dtype) -> Array:
    """Casts float32 values to `dtype` such that no compiler skips the rounding; others of it pass.

    Within one program XLA may widen a bfloat16 result again without having rounded it, on CPU and
    GPU alike, and whether it does depends on the surroundings. What is rounded needs no second
    rounding: on a CPU the cast takes the upper half of the bits; on a GPU it is a cast, which what
    comes before can take in.
    """
    return x if x.dtype == dtype else cast(Array, _settle(x, dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _settle(x: Array, dtype: jnp.dtype) -> Array:
    rounded = round_to(x, dtype)
    return narrow_exact(rounded, dtype) if machines.current().platform == "cpu" else rounded.astype(dtype)


@_settle.defjvp
def _settle_jvp(dtype: jnp.dtype, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return settle(primals[0], dtype), tangents[0].astype(dtype)


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


def pointwise(fn: Callable[..., Array], *arrays: Array, order: Order = "free") -> Array:
    """Applies an elementwise function; in the fixed order an element's bits depend on it alone.

    XLA on a CPU computes exp and its like in vectors and the last few elements one by one, with
    other roundings, and may contract a product with a neighbouring sum. The fixed order pads to
    whole runs of 64 elements and fences them off.

    Args:
        fn: elementwise, of as many arrays as are given; e.g. `jax.nn.silu`.
        arrays: one shape.
        order: "free" is `fn(*arrays)`.

    Returns:
        An array of that shape.
    """
    if order == "free":
        return fn(*arrays)
    shape, size = arrays[0].shape, arrays[0].size
    padded = [jnp.pad(a.reshape(-1), (0, -size % _RUN)).reshape(-1, _RUN) for a in arrays]
    out = optimization_barrier(fn(*optimization_barrier(tuple(padded))))
    return out.reshape(-1)[:size].reshape(shape)
