"""Paired 4:8, the FP4 sparsity of Blackwell's tensor cores: two of four adjacent pairs."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import largest_two, runs, unrun
from fp4rl_jax.quantizers.residual._halves import Halves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs48(Halves):
    """Of every four adjacent pairs keeps the two with the largest L2 norm; ties: the lower index."""

    run: ClassVar[int] = 8

    def kept(self, residual: Array) -> Array:
        pairs = runs(residual * residual, 8)
        energy = pairs[..., 0::2] + pairs[..., 1::2]  # [M, n, 4]; squares of codes are exact
        return unrun(jnp.repeat(largest_two(energy), 2, axis=-1), residual.shape[-1])


SELECTION = Pairs48()
