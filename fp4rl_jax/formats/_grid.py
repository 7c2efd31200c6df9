"""Small magnitude grids and the place of a value between two grid points.

A `Bracket` answers the questions that every rounding asks. It compares |x| with exact thresholds
and does no arithmetic whose result could be rounded, contracted or folded.
"""

import abc
import dataclasses
import math
from fractions import Fraction
from typing import Literal

import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits, _e4m3

Ties = Literal["even", "away"]


class Bracket(abc.ABC):
    """Magnitudes between neighbouring codes; every method returns an int32 (or bool) array."""

    @abc.abstractmethod
    def nearest(self) -> Array:
        """The magnitude code nearest to |x|, by the format's tie rule, saturating."""

    @abc.abstractmethod
    def lower(self) -> Array:
        """The largest magnitude code whose value does not exceed |x|."""

    @abc.abstractmethod
    def exact(self) -> Array:
        """bool, True where |x| is a grid point or beyond the last one."""

    @abc.abstractmethod
    def random(self, random_bits: Array, bits: int) -> Array:
        """`lower()` or the code above it, the latter with the probability of the fraction.

        Args:
            random_bits: uint32 in the shape of x, uniform.
            bits: how many of them to use, 16 to 22.
        """


@dataclasses.dataclass(frozen=True)
class Grid:
    """The magnitudes of a sign-magnitude code, in order; code j is `values[j]`.

    Attributes:
        values: increasing, starting with 0, each a dyadic rational of few bits.
        ties: where a value half-way between two codes goes, "even" code or "away" from zero.
    """

    values: tuple[float, ...]
    ties: Ties = "even"

    @property
    def max(self) -> float:
        """The largest magnitude."""
        return self.values[-1]

    def decode(self, magnitude: Array) -> Array:
        """float32 value of integer magnitude codes."""
        unit = Fraction(1, math.lcm(*(Fraction(v).denominator for v in self.values)))
        levels = [int(Fraction(v) / unit) for v in self.values]
        whole = jnp.zeros_like(magnitude)  # in units: piecewise linear, bent where the step changes
        for code, bend in enumerate(np.diff(np.diff(levels), prepend=0)):
            if bend:
                whole = whole + jnp.maximum(magnitude - code, 0) * int(bend)
        return whole.astype(jnp.float32) * jnp.float32(unit)


@dataclasses.dataclass(frozen=True)
class GridBracket(Bracket):
    """|x| against `grid.values * unit`.

    Attributes:
        grid: the magnitudes.
        magnitude: [..., b] float32 >= 0, exact.
        unit: float32 broadcastable to it: the value of one grid unit, with so few significant
            bits that its products with midpoints are exact.
    """

    grid: Grid
    magnitude: Array
    unit: Array

    def nearest(self) -> Array:
        code = jnp.zeros(self.magnitude.shape, jnp.int32)
        levels = self.grid.values
        for above in range(1, len(levels)):
            threshold = jnp.float32((levels[above - 1] + levels[above]) / 2) * self.unit
            goes_up = self.grid.ties == "away" or above % 2 == 0
            reached = self.magnitude >= threshold if goes_up else self.magnitude > threshold
            code = code + reached.astype(jnp.int32)
        return code

    def lower(self) -> Array:
        code = jnp.zeros(self.magnitude.shape, jnp.int32)
        for level in self.grid.values[1:]:
            code = code + (self.magnitude >= jnp.float32(level) * self.unit).astype(jnp.int32)
        return code

    def exact(self) -> Array:
        points = [self.magnitude == jnp.float32(level) * self.unit for level in self.grid.values]
        on_grid = self.magnitude >= jnp.float32(self.grid.max) * self.unit
        # `scaled` turns zero into a tiny positive number, hence the comparison below the grid
        tiny = self.magnitude <= jnp.float32(2.0**-40) * self.unit
        for point in points:
            on_grid = on_grid | point
        return on_grid | tiny

    def random(self, random_bits: Array, bits: int) -> Array:
        odd = (random_bits >> (32 - bits)) * 2 + 1  # (r + 1/2) / 2^bits: symmetric, never 0 or 1
        fraction = odd.astype(jnp.float32) * jnp.float32(2.0 ** -(bits + 1))
        code = jnp.zeros(self.magnitude.shape, jnp.int32)
        levels = self.grid.values
        for below, above in zip(levels[:-1], levels[1:], strict=True):
            # at 16 bits the product and the sum are exact; at more, `opaque` fixes the order
            rise = _bits.opaque(fraction * (jnp.float32(above - below) * self.unit))
            threshold = jnp.float32(below) * self.unit + rise
            code = code + (self.magnitude > threshold).astype(jnp.int32)
        return code


@dataclasses.dataclass(frozen=True)
class E4M3Bracket(Bracket):
    """|x| / scale in log form against the 127 E4M3 magnitudes."""

    log: Array

    def nearest(self) -> Array:
        return _e4m3.round_log(self.log)

    def lower(self) -> Array:
        return _e4m3.round_log(self.log, to="down")

    def exact(self) -> Array:
        tiny = _bits.exponent(self.log) < -60  # zero, or nothing beside the scale
        return tiny | (self.lower() == _e4m3.round_log(self.log, to="up"))

    def random(self, random_bits: Array, bits: int) -> Array:
        del bits  # at least 20 are always used
        return _e4m3.random_log(self.log, random_bits)


#: 4-bit floats of NVFP4 and MXFP4: ties go to the even code, which has the even mantissa.
E2M1 = Grid(values=(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), ties="even")
