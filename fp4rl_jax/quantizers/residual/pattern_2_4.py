"""2:4 along the contraction axis (S_2:4 of Rollout-ResQ, arXiv 2607.26515)."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import Selection, largest_two_of_four


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern24(Selection):
    """Keeps the two largest magnitudes of every four consecutive elements; ties: the lower index."""

    @property
    def batch_invariant(self) -> bool:
        return True

    def kept_share(self, length: int, block: int) -> float:
        del block
        whole, rest = divmod(length, 4)
        return (2 * whole + min(rest, 2)) / length

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        del x, block
        return largest_two_of_four(jnp.abs(residual))


SELECTION = Pattern24()
