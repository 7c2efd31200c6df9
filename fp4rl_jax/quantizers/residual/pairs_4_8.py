"""Paired 4:8, the FP4 sparsity of Blackwell's tensor cores: two of four adjacent pairs."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import largest_two_of_four, with_partner
from fp4rl_jax.quantizers.residual._halves import Halves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs48(Halves):
    """Of every four adjacent pairs keeps the two with the largest L2 norm; ties: the lower index."""

    run: ClassVar[int] = 8

    def kept(self, residual: Array) -> Array:
        length = residual.shape[-1]
        even = jnp.pad(residual, ((0, 0), (0, length % 2)))  # an odd last one has a partner of zero
        energy = with_partner(even * even)  # squares of codes are exact
        return largest_two_of_four(energy, stride=2)[:, :length]


SELECTION = Pairs48()
