"""The meaning of the packed matmul: decoded weights, products and sums in float32, scales after them."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import decode
from pallas_kernels.matmul import reference

Array = jax.Array


def matmul(
    x: Array,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    residual: Array | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    order: str = "free",
) -> Array:
    """(x @ w.T + residual @ w[:, :k'].T) * row_scale * scale.

    Args:
        x: [m, k] bfloat16, columns ordered as the weight's (`formats.order_k`).
        packed: uint32 [n / 64, k / BLOCK_K, rows, 128], see `formats.pack`.
        row_scale: [m] float32, the activations' outer scales.
        scale: [1] float32, the weight's outer scale times its `unit`.
        fmt: the weight's format.
        residual: [m, k'] bfloat16 or None, a second term of the activations on their first k' columns.
        out_dtype: float32 or bfloat16.
        order: any; "fixed" asks other implementations for rows that do not depend on m.

    Returns:
        [m, n] out_dtype.
    """
    del order
    w = decode(packed, fmt)
    out = reference.matmul(x, w)
    if residual is not None:
        out += reference.matmul(residual, w[:, : residual.shape[1]])
    return (out * (row_scale[:, None] * scale[0])).astype(out_dtype)
