"""A block's grid as a ladder in bfloat16: which value x is rounded to, in 16-bit integers alone.

Where all elements of a block are compared with the same few grid points times one scale, "the value
nearest to x" is a staircase of x: from the threshold `t[i]` on it is higher by `d[i]`. Thresholds and
steps are computed once a block; what is left for an element is a comparison and an addition a step, on
bit patterns of bfloat16, with no scale, no code and no float in between. A CPU handles twice as many
16-bit as 32-bit integers at once.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits
from fp4rl_jax.formats._grid import Grid

_MAGNITUDE = np.int16(0x7FFF)
_SIGN = np.int16(-0x8000)


@struct.dataclass
class Ladder:
    """The staircase of every block, in bit patterns of bfloat16.

    The steps lie beside each other, row by row: apart, their streams would meet in the same cache lines.
    Two arrays and no more: each is a kernel of a CPU's program.

    Attributes:
        thresholds: [..., steps, blocks] int16, the smallest magnitude that takes the step.
        heights: [..., 1 + steps, blocks] int16: the pattern of the value below the first step, which is 0 or
            nan's, then what every step adds to it. The first of these is 0 where a block's codes are all
            zero, and there alone.
    """

    thresholds: Array
    heights: Array


def build(grid: Grid, scale: Array, values: Array, live: Array) -> Ladder:
    """The ladder of every block.

    Args:
        grid: magnitudes and tie rule.
        scale: [..., blocks] int32, log form (see `_bits`) of block scale times outer scale, below 2^127
            and of so few significant bits that a product with a midpoint of the grid is exact.
        values: [..., codes, blocks] float32 of at most eight significant bits: what the magnitude
            codes stand for.
        live: [..., blocks] bool, False where a block's codes are all zero.
    """
    scale = lax.optimization_barrier(scale)[..., None, :]  # stored, not made again for every step
    levels = np.asarray(grid.values, np.float32)
    middle = ((levels[:-1] + levels[1:]) / 2)[:, None]
    stays = np.array([grid.ties == "even" and above % 2 == 1 for above in range(1, len(levels))], np.int32)
    product = lax.bitcast_convert_type(middle * _bits.unit(scale), jnp.int32)
    shift = _bits.exponent(scale) << _bits.MANTISSA
    patterns = _pattern(values)
    below = jnp.pad(patterns[..., :-1, :], [(0, 0)] * (patterns.ndim - 2) + [(1, 0), (0, 0)])
    steps = np.arange(len(levels))[:, None] > 0
    return Ladder(
        thresholds=_pattern_at_least(product + shift + stays[:, None]),
        heights=jnp.where(live[..., None, :] | ~steps, patterns - below, 0),
    )


def nearest(x: Array, ladder: Ladder) -> Array:
    """[..., blocks, block] bfloat16 -> the same shape: the values that a block's codes would stand for."""
    bits = lax.bitcast_convert_type(x, jnp.int16)
    magnitude = bits & _MAGNITUDE
    value = ladder.heights[..., 0, :, None]
    for i in range(ladder.thresholds.shape[-2]):
        reached = magnitude >= ladder.thresholds[..., i, :, None]
        value = value + jnp.where(reached, ladder.heights[..., 1 + i, :, None], 0)
    signs = jnp.where(ladder.heights[..., 1, :, None] != 0, _SIGN, 0)
    return lax.bitcast_convert_type(value | (bits & signs), jnp.bfloat16)


def _pattern_at_least(log: Array) -> Array:
    """int16 pattern of the smallest bfloat16 whose log form is at least `log`; infinity's at most."""
    field = log >> _bits.MANTISSA
    shift = jnp.clip(1 - field, 0, 31)  # of a subnormal
    subnormal = (_bits.significand(log) + ((1 << shift) - 1)) >> shift
    raw = jnp.where(field >= 1, log, subnormal)
    return (jnp.clip(raw + 0xFFFF, 0, _bits.RAW_INFINITY) >> 16).astype(jnp.int16)


def _pattern(values: Array) -> Array:
    return (lax.bitcast_convert_type(values, jnp.int32) >> 16).astype(jnp.int16)
