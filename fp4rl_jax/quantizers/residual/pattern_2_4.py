"""2:4 along the contraction axis (S_2:4 of Rollout-ResQ, arXiv 2607.26515)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import largest_two_of_four
from fp4rl_jax.quantizers.residual._halves import Halves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern24(Halves):
    """Keeps the two largest magnitudes of every four consecutive elements; ties: the lower index."""

    run: ClassVar[int] = 4

    def kept(self, residual: Array) -> Array:
        return largest_two_of_four(jnp.abs(residual))


SELECTION = Pattern24()
