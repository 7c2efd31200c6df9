"""The meaning of the grouped matmul: one expert after another, rows of other experts zeroed."""

import jax
import jax.numpy as jnp

Array = jax.Array


def members(group_sizes: Array, num_rows: int) -> Array:
    """[E, M] bool: which rows, sorted by group, belong to which group."""
    ends = jnp.cumsum(group_sizes)[:, None]
    rows = jnp.arange(num_rows)[None, :]
    return (rows < ends) & (rows >= ends - group_sizes[:, None])


def grouped_matmul(x: Array, w: Array, group_sizes: Array, *, axis: int = 2) -> Array:
    """Row i of x times the weight of its group, contracting `axis` of w, in float32.

    Args:
        x: [m, k], rows sorted by group; w: [g, n, k] (axis 2) or [g, k, n] (axis 1).
        group_sizes: [g] int32; rows beyond their sum give zeros.

    Returns:
        [m, n] float32.
    """
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    inside = members(group_sizes, x.shape[0])
    out = jnp.zeros((x.shape[0], w.shape[3 - axis]), jnp.float32)
    for group in range(w.shape[0]):
        rows = jnp.where(inside[group][:, None], x, 0.0)
        contracting = (((1,), (axis - 1,)), ((), ()))
        out += jax.lax.dot_general(rows, w[group], contracting, precision=jax.lax.Precision.HIGHEST)
    return out


def grouped_outer(a: Array, b: Array, group_sizes: Array) -> Array:
    """Sums the outer products of the rows of each group, in float32.

    Args:
        a: [m, n]; b: [m, k]; rows sorted by group.
        group_sizes: [g] int32.

    Returns:
        [g, n, k] float32.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    inside = members(group_sizes, a.shape[0])
    masked = jnp.where(inside[:, :, None], a[None], 0.0)  # [g, m, n]
    return jnp.einsum("gmn,mk->gnk", masked, b, precision=jax.lax.Precision.HIGHEST)
