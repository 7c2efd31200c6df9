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

    Attributes:
        thresholds: [..., steps, blocks] int16, the smallest magnitude that takes the step.
        heights: [..., steps, blocks] int16, what the step adds to the pattern of the value.
        floor: [..., blocks] int16, pattern of the value below the first step: 0, or nan's.
        signs: [..., blocks] int16, the sign bit, or 0 where a block's values have none.
    """

    thresholds: Array
    heights: Array
    floor: Array
    signs: Array


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
    parts = _bits.unit(scale), _bits.exponent(scale) << _bits.MANTISSA
    unit, shift = lax.optimization_barrier(parts)  # stored, not made again for every step
    levels = np.asarray(grid.values, np.float32)
    middle = ((levels[:-1] + levels[1:]) / 2)[:, None]
    stays = np.array([grid.ties == "even" and above % 2 == 1 for above in range(1, len(levels))], np.int32)
    product = lax.bitcast_convert_type(middle * unit[..., None, :], jnp.int32)
    patterns = _pattern(values)
    return Ladder(
        thresholds=_pattern_at_least(product + shift[..., None, :] + stays[:, None]),
        heights=jnp.where(live[..., None, :], patterns[..., 1:, :] - patterns[..., :-1, :], 0),
        floor=patterns[..., 0, :],
        signs=jnp.where(live, _SIGN, 0),
    )


def nearest(x: Array, ladder: Ladder) -> Array:
    """[..., blocks, block] bfloat16 -> the same shape: the values that a block's codes would stand for."""
    bits = lax.bitcast_convert_type(x, jnp.int16)
    magnitude = bits & _MAGNITUDE
    value = jnp.zeros((), jnp.int16)
    for i in range(ladder.thresholds.shape[-2]):
        reached = magnitude >= ladder.thresholds[..., i, :, None]
        value = value + jnp.where(reached, ladder.heights[..., i, :, None], 0)
    value = value | ladder.floor[..., None] | (bits & ladder.signs[..., None])
    return lax.bitcast_convert_type(value, jnp.bfloat16)


def _pattern_at_least(log: Array) -> Array:
    """int16 pattern of the smallest bfloat16 whose log form is at least `log`; infinity's at most."""
    field = log >> _bits.MANTISSA
    shift = jnp.clip(1 - field, 0, 31)  # of a subnormal
    subnormal = (_bits.significand(log) + ((1 << shift) - 1)) >> shift
    raw = jnp.where(field >= 1, log, subnormal)
    return (jnp.clip(raw + 0xFFFF, 0, _bits.RAW_INFINITY) >> 16).astype(jnp.int16)


def _pattern(values: Array) -> Array:
    return (lax.bitcast_convert_type(values, jnp.int32) >> 16).astype(jnp.int16)
