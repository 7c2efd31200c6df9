"""Selections that keep half of every short run of consecutive elements, from the run alone."""

import dataclasses
from typing import ClassVar

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halves(Selection):
    """Keeps `run` / 2 elements of every `run`, and at most as many of a short last one."""

    run: ClassVar[int]

    @property
    def batch_invariant(self) -> bool:
        return True

    def kept_share(self, length: int, block: int) -> float:
        del block
        half = self.run // 2
        whole, rest = divmod(length, self.run)
        return (half * whole + min(rest, half)) / length

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        del x, block
        return self.kept(residual)

    def kept(self, residual: Array) -> Array:
        """Which elements of a residual [M, K] float32 are kept: bool [M, K]."""
        raise NotImplementedError
