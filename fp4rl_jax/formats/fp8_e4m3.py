"""FP8 E4M3: 8-bit elements under one float32 scale a row, or a block of 128; 8 bits a value."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from fp4rl_jax.arrays import Array, unknown_name
from fp4rl_jax.formats import _bits, _e4m3
from fp4rl_jax.formats._base import Format, Span
from fp4rl_jax.formats._grid import E4M3Bracket, Grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8E4M3(Format):
    """E4M3 element * float32 outer scale (amax / 448); there are no scale bytes.

    Attributes:
        block_size: None for one scale a row (along the quantized axis), or 128.
    """

    block_size: int | None = None
    code_bits: ClassVar[int] = 8
    scale_width: ClassVar[int] = 0
    scale_nan: ClassVar[int | None] = None
    native: ClassVar[str | None] = "float8_e4m3fn"
    grid: ClassVar[Grid] = Grid(values=(0.0, _e4m3.MAX))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size not in (None, 128):
            raise unknown_name("block_size of format fp8_e4m3", str(self.block_size), ("None", "128"))

    @property
    def block(self) -> int | None:
        return self.block_size

    @property
    def span(self) -> Span:
        return "row" if self.block_size is None else "block"

    @property
    def outer_is_power_of_two(self) -> bool:
        return False

    def outer_from_amax(self, amax: Array) -> Array:
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
        log = _bits.from_float(x)
        if outer_scale is None:
            return E4M3Bracket(log)
        inverse = _bits.divide(jnp.int32(_bits.ONE), _bits.from_float(outer_scale)[..., None])
        return E4M3Bracket(_bits.multiply(log, inverse))

    def element(self, codes: Array) -> Array:
        magnitude = _e4m3.decode(codes & 0x7F)
        return jnp.where(codes >> 7 == 1, -magnitude, magnitude)


FORMAT = FP8E4M3()
