"""A grouped matmul whose rows do not depend on how many there are: one row after another.

Every row fetches its group's weight and goes through the row-invariant matmul alone. Slow (the
weight is read once a row); it exists to prove equalities.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Facts
from pallas_kernels.matmul import rows

Array = jax.Array


def grouped_matmul(x: Array, w: Array, group_sizes: Array, *, axis: int = 2) -> Array:
    """`reference.grouped_matmul`, row by row independent."""
    m, last = x.shape[0], w.shape[0] - 1
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(m), side="right")
    valid = jnp.arange(m) < jnp.sum(group_sizes)

    def one_row(args: tuple[Array, Array]) -> Array:
        row, index = args
        weight = jax.lax.dynamic_index_in_dim(w, index, keepdims=False)
        return rows.matmul(row[None], weight, dims=(1, axis - 1))[0]

    out = jax.lax.map(one_row, (x, jnp.minimum(group, last)))
    return jnp.where(valid[:, None], out, 0.0)


def refuses(facts: Facts) -> str | None:
    """As the row-invariant matmul."""
    return rows.refuses(facts)
