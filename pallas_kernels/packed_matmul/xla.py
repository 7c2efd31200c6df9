"""The packed matmul as the compiler does it: weights decoded to bfloat16 in memory, then dense dots."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Facts
from pallas_kernels.formats import decode
from pallas_kernels.matmul import xla
from pallas_kernels.packed_matmul.block_scaled import Coded, multiplied

Array = jax.Array


def matmul(
    x: Array | Coded,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    residual: Array | Coded | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    order: str = "free",
) -> Array:
    """`reference.matmul`: 2.56 bytes a weight are moved to decode, then two a weight to multiply.

    Error: the products are exact; only the order of the sums differs.
    """
    del order
    w = jax.lax.optimization_barrier(decode(packed, fmt))
    out = _term(x, w, fmt)
    if residual is not None:
        out += _term(residual, w, fmt)
    return (out * (row_scale[:, None] * scale[0])).astype(out_dtype)


def _term(x: Array | Coded, w: Array, fmt: str) -> Array:
    values, outer = multiplied(x, fmt)
    out = xla.dense(values, w[:, : values.shape[1]])
    return out if outer is None else out * outer[:, None]


def refuses(facts: Facts) -> str | None:
    """Only the free order: a dense dot's rows depend on how many there are."""
    if facts.order != "free":
        return f"its rows depend on how many there are; order is {facts.order!r}"
    return None
