"""NVFP4: 16 E2M1 elements under one E4M3 scale, and a float32 outer scale; 4.5 bits a value.

Two levels because E4M3 alone spans 17 binades: the outer scale brings the largest block to the
top of them. Its rounding is `pow2` by default (a power of two, exact in bfloat16, commuting with
every other rounding); `fp32` is the vendor's, amax / 2688, with the vendor's order of operations.
"""

import dataclasses
from typing import ClassVar, Literal, cast

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits, _e4m3
from fp4rl_jax.formats._base import Format, Span, choices, once, share_rows
from fp4rl_jax.formats._grid import E2M1, Bracket, Grid, GridBracket

_SIXTH = 0x3E2AAAAB  # float32(1/6) as a bit pattern, which is its log form too


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
    """Element * E4M3 block scale * float32 outer scale.

    Attributes:
        outer: the span of the outer scale: "tensor", "row" (one along the quantized axis, so that
            a token's codes depend on that token only) or "static" (given by the caller).
        outer_rounding: "pow2" (smallest 2^k with amax <= 2688 * 2^k, never below 2^-126) or "fp32".
        block_shape: "1x16" or "16x16" (the same values whether W or its transpose is quantized;
            the block's byte is stored for each of its rows).
        four_over_six: "off", or per block the scale that maps its maximum to 6 or to 4, whichever
            has the lower "mae" or "mse"; a tie keeps 6 (arXiv 2512.02010, bound 256).
        scale_rounding: block scales to the "nearest" E4M3 value, or "up" so that no element is
            clipped, which stochastic rounding needs to be unbiased.
    """

    outer: str = choices("tensor", "tensor", "row", "static")
    outer_rounding: str = choices("pow2", "pow2", "fp32")
    block_shape: str = choices("1x16", "1x16", "16x16")
    four_over_six: str = choices("off", "off", "mae", "mse")
    scale_rounding: str = choices("nearest", "nearest", "up")
    grid: ClassVar[Grid] = E2M1
    scale_kind: ClassVar[str] = "E4M3"
    scale_nan: ClassVar[int] = _e4m3.NAN_BYTE

    @property
    def block(self) -> int:
        return 16

    @property
    def block_rows(self) -> int:
        return 16 if self.block_shape == "16x16" else 1

    @property
    def span(self) -> Span:
        return cast(Span, self.outer)

    @property
    def outer_is_power_of_two(self) -> bool:
        return self.outer_rounding == "pow2"

    @property
    def has_ladder(self) -> bool:
        return self.outer_is_power_of_two and self.span != "static"

    @property
    def _bound(self) -> float:
        """Largest product of element and block scale that the outer scale aims at."""
        return 6 * (448.0 if self.four_over_six == "off" else 256.0)

    # ---- scales ------------------------------------------------------------------------------
    def outer_from_amax(self, amax: Array) -> Array:
        log = _bits.log_form(amax)
        bound = _bits.from_float(jnp.float32(self._bound))
        if self.outer_rounding == "fp32":
            return jnp.where(amax == 0, 0, _bits.to_float(_bits.divide(log, bound)))
        # 2688 = 1.3125 * 2^11 and 1536 = 1.5 * 2^10: one binade more if the fraction is larger
        mask = (1 << _bits.MANTISSA) - 1
        more = ((log & mask) > (bound & mask)).astype(jnp.int32)
        k = _bits.exponent(log) - _bits.exponent(bound) + more
        return _bits.power_of_two(jnp.where(amax == 0, 0, jnp.maximum(k, -126)))

    def choose_scales(
        self, x: Array, amax: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Array:
        assert outer_scale is not None
        for_six = self._scale_byte(amax, outer_scale, span_amax, 6)
        if self.four_over_six == "off":
            return for_six
        for_four = self._scale_byte(amax, outer_scale, span_amax, 4)
        six = self._error(x, for_six, outer_scale, span_amax)
        four = self._error(x, for_four, outer_scale, span_amax)
        return jnp.where(four < six, for_four, for_six)

    def _scale_byte(
        self, amax: Array, outer_scale: Array, span_amax: Array | None, divisor: Literal[4, 6]
    ) -> Array:
        """uint8 byte of the scale that maps a block maximum to `divisor`."""
        log = _bits.log_form(amax)
        to: _e4m3.Direction = "up" if self.scale_rounding == "up" else "nearest"
        if self.outer_rounding == "fp32":
            encode_scale = self._encode_scale(outer_scale, span_amax)
            byte = _e4m3.round_log(self._vendor_ratio(log, encode_scale, divisor), to=to)
        else:
            byte = _e4m3.round_ratio(self.over_outer(log, outer_scale), divisor, to=to)
        byte = jnp.where(amax == 0, 0, byte)
        poisoned = (amax >= _bits.RAW_INFINITY) | ~jnp.isfinite(outer_scale)
        return jnp.where(poisoned, self.scale_nan, byte).astype(jnp.uint8)

    def _encode_scale(self, outer_scale: Array, span_amax: Array | None) -> Array:
        """Log form of the vendor's S_enc = bound / amax; from the outer scale where amax is gone."""
        one = jnp.int32(_bits.ONE)
        if span_amax is None:
            encode_scale = _bits.divide(one, _bits.from_float(outer_scale))
        else:
            bound = _bits.from_float(jnp.float32(self._bound))
            encode_scale = _bits.divide(bound, _bits.log_form(span_amax))
        zero = outer_scale == 0 if span_amax is None else span_amax == 0
        return jnp.where(zero, one, jnp.minimum(encode_scale, _bits.RAW_MAX))

    def _vendor_ratio(self, log: Array, encode_scale: Array, divisor: Literal[4, 6]) -> Array:
        """Log form of a block maximum over its outer scale and divisor, in the vendor's order."""
        if self.four_over_six == "off":
            return _bits.multiply(log, _bits.multiply(encode_scale, jnp.int32(_SIXTH)))
        base = _bits.multiply(_bits.divide(log, _bits.from_float(jnp.float32(6))), encode_scale)
        return base if divisor == 6 else _bits.multiply(base, _bits.from_float(jnp.float32(1.5)))

    def block_scale(self, scales: Array) -> Array:
        return _e4m3.decode(scales)

    # ---- codes -------------------------------------------------------------------------------
    def bracket(
        self, x: Array, scales: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Bracket:
        if outer_scale is None or self.outer_rounding == "pow2":
            return super().bracket(x, scales, outer_scale)
        # the vendor's order: x * min(1 / (block scale * S_dec), float32 max)
        one = jnp.int32(_bits.ONE)
        decode_scale = _bits.divide(one, self._encode_scale(outer_scale, span_amax)[..., None])
        scale = _bits.from_float(self.block_scale(scales)[..., None])
        inverse = _bits.divide(one, _bits.multiply(scale, decode_scale))
        inverse = once(jnp.minimum(inverse, _bits.RAW_MAX))
        quotient = _bits.multiply(_bits.from_float(x), inverse)
        return GridBracket(self.grid, _bits.scaled(quotient, 0), jnp.float32(1))

    def _product(self, element: Array, scale: Array) -> Array:
        return element * scale  # at least 2^-10, exact

    def _error(self, x: Array, scales: Array, outer_scale: Array, span_amax: Array | None) -> Array:
        """Summed error of each block under the given scale bytes, in units of the outer scale."""
        codes = self.encode(x, scales, outer_scale, span_amax=span_amax)
        blocks, _ = self._to_blocks(x)
        inner = self._to_blocks(self.inner(codes, scales))[0]
        magnitude = _bits.scaled(self.over_outer(_bits.from_float(blocks), outer_scale[..., None]), 0)
        error = jnp.abs(magnitude - jnp.abs(inner))
        if self.four_over_six == "mse":
            error = _bits.opaque(error * error)
        total = error[..., 0]
        for i in range(1, 16):  # a written order, so that every compiler adds alike
            total = total + error[..., i]
        return share_rows(total, self.block_rows, "sum")


FORMAT = NVFP4()
