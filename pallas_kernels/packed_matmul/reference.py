"""The meaning of the packed matmul: decoded weights, products and sums in float32, scales after them."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import decode
from pallas_kernels.matmul import reference
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
    """(x @ w.T + residual @ w[:, :k'].T) * row_scale * scale.

    Args:
        x: [m, k] bfloat16, columns ordered as the weight's (`formats.order_k`), or `Coded` in the natural
            order, whose rows have outer scales of their own, too.
        packed: uint32 [n / 64, k / BLOCK_K, rows, 128], see `formats.pack`.
        row_scale: [m] float32, the activations' outer scales.
        scale: [1] float32, the weight's outer scale times its `unit`.
        fmt: the weight's format.
        residual: [m, k'] of x's kind or None, a second term of the activations on their first k' columns.
        out_dtype: float32 or bfloat16.
        order: any; "fixed" asks other implementations for rows that do not depend on m.

    Returns:
        [m, n] out_dtype.
    """
    del order
    w = decode(packed, fmt)
    out = _term(x, w, fmt)
    if residual is not None:
        out += _term(residual, w, fmt)
    return (out * (row_scale[:, None] * scale[0])).astype(out_dtype)


def _term(x: Array | Coded, w: Array, fmt: str) -> Array:
    values, outer = multiplied(x, fmt)
    out = reference.matmul(values, w[:, : values.shape[1]])
    return out if outer is None else out * outer[:, None]
