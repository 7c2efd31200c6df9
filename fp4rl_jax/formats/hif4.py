"""HiF4 (HiFloat4): 64 S1P2 elements under three levels of scale, 4.5 bits a value.

Level 1 is an unsigned E6M2 scale a block, level 2 a factor 1 or 2 for each 8 elements, level 3
one for each 4. Conversion follows the public numpy oracle bit for bit, its two bfloat16 roundings
included: they are part of the format. The four metadata bytes of a block are E6M2, the eight
level-2 bits (bit k for group k), and the sixteen level-3 bits, low byte first.
"""

import dataclasses
from typing import ClassVar, cast

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits
from fp4rl_jax.formats._base import Format, Span, choices, once
from fp4rl_jax.formats._grid import Grid, GridBracket

#: bfloat16(1 / m) of the E6M2 significands m = 1, 1.25, 1.5, 1.75, as R * 2^-8 (1 is 128 * 2^-7)
_RECIPROCALS = (128, 205, 171, 146)
_SEVENTH = 73  # bfloat16(1/7) = 73 / 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiF4(Format):
    """Element * 2^(level 2 + level 3) * E6M2 (* an optional power-of-two outer scale).

    Attributes:
        outer: "none" (the format as published; values below about 1e-12 underflow), or a
            power-of-two outer scale a "tensor", a "row", or given ("static"), for gradients.
        scale_rounding: "nearest" is the published conversion, under which block maxima between 7 and
            7.9 times their scale, and groups just below a factor's threshold, are clipped. "up" takes the
            smallest level-1 scale and the smallest factors under which no element is, which stochastic
            rounding needs to be unbiased; the bytes mean the same.
    """

    outer: str = choices("none", "none", "tensor", "row", "static")
    scale_rounding: str = choices("nearest", "nearest", "up")
    grid: ClassVar[Grid] = Grid(values=(0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75), ties="away")
    scale_width: ClassVar[int] = 4
    scale_kind: ClassVar[str] = "E6M2, 8 and 16 one-bit factors"

    @property
    def block(self) -> int:
        return 64

    @property
    def span(self) -> Span:
        return cast(Span, self.outer)

    # ---- scales ------------------------------------------------------------------------------
    def outer_from_amax(self, amax: Array) -> Array:
        """The smallest 2^k with amax <= 7 * 2^k."""
        log = _bits.log_form(amax)
        fraction = log & ((1 << _bits.MANTISSA) - 1)
        k = _bits.exponent(log) - 2 + (fraction > 3 << 21).astype(jnp.int32)  # 7 = 1.75 * 4
        return _bits.power_of_two(jnp.where(amax == 0, 0, jnp.maximum(k, -126)))

    def choose_scales(
        self, x: Array, amax: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Array:
        del span_amax
        blocks, _ = self._to_blocks(x)
        peak = _bits.block_amax(blocks.reshape(*blocks.shape[:-1], 16, 4))  # [..., blocks, 16]
        by_four = once(self.over_outer(_bits.log_form(peak), _last(outer_scale)))
        by_eight = jnp.maximum(by_four[..., 0::2], by_four[..., 1::2])
        log = self.over_outer(_bits.log_form(amax), outer_scale)
        if self.scale_rounding == "up":
            level_1 = once(jnp.where(amax == 0, 0, _level_1_up(log)))
            two = _beyond(by_eight, level_1[..., None], -1)  # peak > 3.5 E
            three = _beyond(by_four, level_1[..., None], jnp.repeat(two, 2, axis=-1) - 2)
        else:
            level_1 = once(jnp.where(amax == 0, 0, self._level_1(log)))
            two = _at_least(by_eight, level_1[..., None], 2)  # peak * rec >= 4
            three = _at_least(by_four, level_1[..., None], 1 + jnp.repeat(two, 2, axis=-1))
        poisoned = amax >= _bits.RAW_INFINITY
        if outer_scale is not None:
            poisoned = poisoned | ~jnp.isfinite(outer_scale)
        word = level_1 | (_pack_bits(two) << 8) | (_pack_bits(three) << 16)
        word = jnp.where(poisoned, 0xFF, word)
        scales = lax.bitcast_convert_type(word, jnp.uint8)  # lowest byte first
        return scales.reshape(*scales.shape[:-2], scales.shape[-2] * 4)

    def _level_1(self, log: Array) -> Array:
        """int32 E6M2 byte of a block maximum: bf16(V * bf16(1/7)), then two more bits dropped."""
        product = _bits.significand(log).astype(jnp.uint32) * _SEVENTH  # 29.2 to 30.2 bits, exact
        top = 29 + (product >= (1 << 30)).astype(jnp.int32)
        kept = _round_even(product, (top - 7).astype(jnp.uint32)).astype(jnp.int32)  # 8 bits or 256
        exponent = _bits.exponent(log) - 23 - 9 + top
        mantissa = _round_even(kept.astype(jnp.uint32), jnp.uint32(5)).astype(jnp.int32)
        byte = ((exponent + 48) << 2) + mantissa - 4  # mantissa 4..8: a carry moves up by itself
        return jnp.clip(byte, 0, 0xFE)

    def _fields(self, scales: Array) -> tuple[Array, Array]:
        """E6M2 byte [..., blocks] and level-2 + level-3 exponents [..., blocks, 16], int32."""
        fields = scales.reshape(*scales.shape[:-1], scales.shape[-1] // 4, 4).astype(jnp.int32)
        group = jnp.arange(16)
        two = (fields[..., 1:2] >> (group // 2)) & 1
        three = ((fields[..., 2:3] | (fields[..., 3:4] << 8)) >> group) & 1
        return fields[..., 0], two + three

    def block_scale(self, scales: Array) -> Array:
        """float32 E6M2 value, level 1 only."""
        byte, _ = self._fields(scales)
        value = _e6m2(byte)
        return jnp.where(byte == 0xFF, jnp.float32(jnp.nan), value)

    # ---- codes -------------------------------------------------------------------------------
    def bracket(
        self, x: Array, scales: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> "HiF4Bracket":
        del span_amax
        byte, fine = self._fields(scales)
        unit = once(_e6m2(byte)[..., None] * _bits.power_of_two(fine))  # [..., blocks, 16]
        factor, exponent = _reciprocal(byte)
        factor, shift = once((factor, fine + exponent[..., None]))
        log = self.over_outer(_bits.from_float(x), _last(outer_scale))
        return HiF4Bracket(
            self.grid, _bits.scaled(log, 0), _by_four(unit), log=log, factor=factor, shift=_by_four(shift)
        )

    def inner(self, codes: Array, scales: Array, dtype: DTypeLike = jnp.float32) -> Array:
        blocks, length = self._to_blocks(codes)
        value = self.element(blocks) * self._unit(scales)  # never subnormal: at least 2^-50
        return self._from_blocks(value.astype(dtype), length)

    def _unit(self, scales: Array) -> Array:
        _, fine = self._fields(scales)
        return _by_four(once(self.block_scale(scales)[..., None] * _bits.power_of_two(fine)))


@dataclasses.dataclass(frozen=True)
class HiF4Bracket(GridBracket):
    """A grid bracket whose nearest code goes through the format's bfloat16 reciprocal.

    Attributes:
        log: [..., blocks, 64] log form of |x|.
        factor: [..., blocks] int32 significand of bf16(1 / E6M2).
        shift: [..., blocks, 64] int32: level 2 + level 3 less the exponent of that reciprocal.
    """

    log: Array
    factor: Array
    shift: Array

    def nearest(self) -> Array:
        whole = _bits.significand(self.log).astype(jnp.uint32)
        product = whole * self.factor[..., None].astype(jnp.uint32)  # exact: below 2^32
        # the code is floor(product * 2^-shift + 1/2), saturated
        shift = jnp.clip(self.shift + (23 - 2) - _bits.exponent(self.log), 25, 33).astype(jnp.uint32)
        halves = jnp.where(shift > 32, 0, product >> jnp.minimum(shift - 1, jnp.uint32(31)))
        return jnp.minimum((halves + 1) >> 1, 7).astype(jnp.int32)


def _by_four(x: Array) -> Array:
    """[..., blocks, 16] -> [..., blocks, 64], each value four times."""
    wide = jnp.broadcast_to(x[..., None], (*x.shape, 4))
    return wide.reshape(*x.shape[:-1], 64)


def _last(outer_scale: Array | None) -> Array | None:
    return None if outer_scale is None else outer_scale[..., None]


def _e6m2(byte: Array) -> Array:
    """float32 2^(E - 48) * (1 + M / 4) of an int32 byte."""
    return _bits.power_of_two((byte >> 2) - 48) * (1 + (byte & 3).astype(jnp.float32) * 0.25)


def _reciprocal(byte: Array) -> tuple[Array, Array]:
    """bf16(1 / E6M2) of an int32 byte, as `factor * 2^-exponent`, both int32."""
    m = byte & 3
    factor = jnp.full(byte.shape, _RECIPROCALS[0], jnp.int32)
    for i in (1, 2, 3):
        factor = jnp.where(m == i, _RECIPROCALS[i], factor)
    return factor, jnp.where(m == 0, 7, 8) + (byte >> 2) - 48


def _at_least(log: Array, byte: Array, threshold_exponent: Array | int) -> Array:
    """int32 1 where value * bf16(1 / E6M2) >= 2^threshold_exponent."""
    factor, exponent = _reciprocal(byte)
    product = _bits.significand(log).astype(jnp.uint32) * factor.astype(jnp.uint32)  # >= 2^30
    top = 30 + (product >= jnp.uint32(1 << 31)).astype(jnp.int32)
    return (_bits.exponent(log) - 23 - exponent + top >= threshold_exponent).astype(jnp.int32)


def _level_1_up(log: Array) -> Array:
    """int32 byte of the smallest E6M2 value with V <= 7 E, for a block maximum V = m * 2^e.

    7 E is 2^e times 1.09375, 1.3125, 1.53125, 1.75 and 2.1875 for the bytes from 1.25 * 2^(e - 3) on.
    """
    fraction = log & ((1 << _bits.MANTISSA) - 1)
    byte = ((_bits.exponent(log) + 45) << 2) + 1
    for limit in (3, 10, 17, 24):  # m - 1, in 32nds
        byte = byte + (fraction > limit << (_bits.MANTISSA - 5)).astype(jnp.int32)
    return jnp.clip(byte, 0, 0xFE)


def _beyond(log: Array, byte: Array, exponent: Array | int) -> Array:
    """int32 1 where value > 7 * E6M2 * 2^exponent, of at most six significant bits: exactly."""
    limit = _bits.raw(_e6m2(byte) * 7) + (jnp.asarray(exponent, jnp.int32) << _bits.MANTISSA)
    return (log > limit).astype(jnp.int32)


def _round_even(whole: Array, shift: Array) -> Array:
    """uint32 `whole / 2^shift`, ties to even."""
    one = jnp.uint32(1)
    return (whole + (one << (shift - one)) - one + ((whole >> shift) & one)) >> shift


def _pack_bits(bits: Array) -> Array:
    """[..., n] of 0/1 -> [...] int32, bit k from entry k."""
    return (bits << jnp.arange(bits.shape[-1])).sum(axis=-1)


FORMAT = HiF4()
