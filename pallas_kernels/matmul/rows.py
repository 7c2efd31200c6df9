"""A matmul whose rows do not depend on how many rows there are, nor on each other.

The rows of x are cut into tiles of `TILE_M` (the last one padded with zeros) and a loop runs one
and the same dot on every tile, so a row meets the same instructions in the same order whether it
comes alone or among many. The barriers keep the compiler from merging a single tile with its
surroundings. Position inside a tile, neighbours and counts are proved not to matter by
`tests/kernels/rows_test.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from pallas_kernels.dispatch import Facts
from pallas_kernels.matmul import xla

Array = jax.Array

#: Rows of one tile: m = 1 costs what m = 16 costs, m = 64 about twice the free order.
TILE_M = 16


def refuses(facts: Facts) -> str | None:
    """Only the CPU, where it is proved; operands as for the dense dot."""
    if facts.platform != "cpu":
        return f"row-invariance is proved on the CPU only, not on {facts.platform}"
    return xla.refuses_dense(_free(facts))


def matmul(x: Array, w: Array, *, dims: tuple[int, int] = (1, 1)) -> Array:
    """`reference.matmul`, row by row independent along x's kept axis."""
    if dims[0] == 0:
        x = x.T
    m, k = x.shape
    padding = -m % TILE_M
    tiles = jnp.pad(x, ((0, padding), (0, 0))).reshape(-1, TILE_M, k)  # [m / TILE_M, TILE_M, k]
    tiles, w = optimization_barrier((tiles, w))

    def one_tile(tile: Array) -> Array:
        return optimization_barrier(xla.dense(optimization_barrier(tile), w, dims=(1, dims[1])))

    out = jax.lax.map(one_tile, tiles)  # [m / TILE_M, TILE_M, n]
    return out.reshape(m + padding, -1)[:m]


def _free(facts: Facts) -> Facts:
    return dataclasses.replace(facts, order="free")
