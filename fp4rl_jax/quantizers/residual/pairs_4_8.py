"""Paired 4:8, the FP4 sparsity of Blackwell's tensor cores: two of four adjacent pairs."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import Selection, largest_two, runs, unrun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs48(Selection):
    """Of every four adjacent pairs keeps the two with the largest L2 norm; ties: the lower index."""

    @property
    def batch_invariant(self) -> bool:
        return True

    def kept_share(self, length: int, block: int) -> float:
        del block
        whole, rest = divmod(length, 8)
        return (4 * whole + min(rest, 4)) / length

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        del x, block
        pairs = runs(residual * residual, 8)
        energy = pairs[..., 0::2] + pairs[..., 1::2]  # [M, n, 4]; squares of codes are exact
        return unrun(jnp.repeat(largest_two(energy), 2, axis=-1), residual.shape[-1])


SELECTION = Pairs48()
