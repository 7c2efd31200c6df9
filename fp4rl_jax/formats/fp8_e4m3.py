"""FP8 E4M3: 8-bit elements under one float32 scale a row, or a block of 128, or given; 8 bits a value."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits, _e4m3
from fp4rl_jax.formats._base import Format, Span, choices
from fp4rl_jax.formats._grid import E4M3Bracket, Grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8E4M3(Format):
    """E4M3 element * float32 outer scale; there are no scale bytes.

    Attributes:
        block_size: None for one scale a row (along the quantized axis), or 128.
        outer: "row", the amax of the row (or of its block) / 448, or "static" (given by the caller, as a KV
            cache's). The scale of a largest magnitude is then the smallest 2^k with amax <= 448 * 2^k, never
            below 2^-126, and elements are nan throughout a non-finite row or block, which has no scale of
            its own to say so.
    """

    block_size: int | None = choices(None, None, 128)
    outer: str = choices("row", "row", "static")
    code_bits: ClassVar[int] = 8
    scale_width: ClassVar[int] = 0
    scale_nan: ClassVar[int | None] = None
    native: ClassVar[str | None] = "float8_e4m3fn"
    grid: ClassVar[Grid] = Grid(values=(0.0, _e4m3.MAX))

    @property
    def block(self) -> int | None:
        return self.block_size

    @property
    def span(self) -> Span:
        if self.outer == "static":
            return "static"
        return "row" if self.block_size is None else "block"

    @property
    def outer_is_power_of_two(self) -> bool:
        return self.outer == "static"

    @property
    def code_nan(self) -> int | None:
        return _e4m3.NAN_BYTE if self.outer == "static" else None

    def outer_from_amax(self, amax: Array) -> Array:
        if self.outer == "static":
            log, bound = _bits.log_form(amax), _bits.from_float(jnp.float32(_e4m3.MAX))
            mask = (1 << _bits.MANTISSA) - 1  # 448 = 1.75 * 2^8: one binade more if the fraction is larger
            more = ((log & mask) > (bound & mask)).astype(jnp.int32)
            k = _bits.exponent(log) - _bits.exponent(bound) + more
            return _bits.power_of_two(jnp.where(amax == 0, 0, jnp.maximum(k, -126)))
        quotient = _bits.divide(_bits.log_form(amax), _bits.from_float(jnp.float32(_e4m3.MAX)))
        smallest = jnp.int32(1 << _bits.MANTISSA)  # 2^-126: no consumer meets a subnormal scale
        scale = _bits.to_float(jnp.maximum(quotient, smallest))
        return jnp.where(amax == 0, jnp.float32(1), scale)

    def choose_scales(
        self, x: Array, amax: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Array:
        del amax, outer_scale, span_amax
        return jnp.zeros((*x.shape[:-1], 0), jnp.uint8)

    def block_scale(self, scales: Array) -> Array:
        return jnp.ones((*scales.shape[:-1], 1), jnp.float32)

    def bracket(
        self, x: Array, scales: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> E4M3Bracket:
        del scales, span_amax
        outer = None if outer_scale is None else outer_scale[..., None]
        return E4M3Bracket(self.over_outer(_bits.from_float(x), outer))

    def element(self, codes: Array) -> Array:
        magnitude = _e4m3.decode(codes & 0x7F)
        return jnp.where(codes >> 7 == 1, -magnitude, magnitude)


FORMAT = FP8E4M3()
