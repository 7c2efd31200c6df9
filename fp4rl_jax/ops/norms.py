"""Root-mean-square normalisation, in float32 on both sides."""

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops.rounding import pointwise, settle, tree_sum
from fp4rl_jax.ops.spec import Order


def rms_norm(x: Array, weight: Array, *, eps: float, order: Order = "free") -> Array:
    """Divides the last axis by its root mean square and scales it (Zhang & Sennrich 2019).

    Args:
        x: [..., D] bfloat16 or float32.
        weight: [D].
        eps: added to the mean square.
        order: "fixed" sums the squares by an explicit halving tree.

    Returns:
        [..., D] in x's dtype; every intermediate is float32.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {weight.shape} does not scale the last axis of x {x.shape}")
    x32 = x.astype(jnp.float32)
    square = x32 * x32
    if order == "fixed":
        mean = optimization_barrier(tree_sum(square)[..., None] / x.shape[-1])
        inverse = pointwise(lambda m: jax.lax.rsqrt(m + eps), mean, order=order)
    else:
        inverse = jax.lax.rsqrt(jnp.mean(square, axis=-1, keepdims=True) + eps)
    out = settle((x32 * inverse) * weight.astype(jnp.float32), x.dtype)
    return optimization_barrier(out) if order == "fixed" else out
