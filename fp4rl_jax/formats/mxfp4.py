"""MXFP4 (OCP MX 1.0): 32 E2M1 elements under one E8M0 power-of-two scale, 4.25 bits a value."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits
from fp4rl_jax.formats._base import Format, choices
from fp4rl_jax.formats._grid import E2M1, Grid, GridBracket

#: significands (as fractions of 2^23) above which the exponent grows by one
_HALF = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(Format):
    """Element * 2^(byte - 127); byte 255 is nan; no outer scale.

    Attributes:
        scale_rule: how a block's exponent follows from its maximum a = m * 2^e, m in [1, 2):
            floor: e - 2 (OCP; m > 1.5 saturates). even: one more when m >= 1.75.
            rceil: ceil(log2(a / 6)), nothing saturates. ceil: ceil(log2 a) - 2.
            uos: ceil(log2(a / 7.25)).
    """

    scale_rule: str = choices("floor", "floor", "even", "rceil", "ceil", "uos")
    grid: ClassVar[Grid] = E2M1

    @property
    def block(self) -> int:
        return 32

    def choose_scales(
        self, x: Array, amax: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Array:
        del x, outer_scale, span_amax
        log = _bits.log_form(amax)
        fraction = log & ((1 << _bits.MANTISSA) - 1)
        grows = {
            "floor": jnp.zeros(amax.shape, bool),
            "even": fraction >= 3 * _HALF // 2,  # m >= 1.75
            "rceil": fraction > _HALF,  # m > 1.5
            "ceil": fraction > 0,  # m > 1
            "uos": fraction > 13 * _HALF // 8,  # m > 1.8125 = 7.25 / 4
        }[self.scale_rule]
        byte = jnp.clip(_bits.exponent(log) - 2 + grows.astype(jnp.int32) + 127, 0, 254)
        byte = jnp.where(amax == 0, 0, byte)
        return jnp.where(amax >= _bits.RAW_INFINITY, 255, byte).astype(jnp.uint8)

    def block_scale(self, scales: Array) -> Array:
        """2^-127 (byte 0) is a float32 subnormal; only `_live` looks at this value."""
        byte = scales.astype(jnp.int32)
        bits = jnp.where(byte == 0, 1 << 22, byte << _bits.MANTISSA)
        value = lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(byte == 255, jnp.float32(jnp.nan), value)

    def bracket(
        self, x: Array, scales: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> GridBracket:
        del outer_scale, span_amax
        exponent = (scales.astype(jnp.int32) - 127)[..., None]
        magnitude = _bits.scaled(_bits.from_float(x), exponent)
        return GridBracket(self.grid, magnitude, jnp.float32(1))

    def inner(self, codes: Array, scales: Array, dtype: DTypeLike = jnp.float32) -> Array:
        """Built from bits, so that the smallest scales, whose products are subnormal, are right."""
        blocks, length = self._to_blocks(codes)
        byte = scales.astype(jnp.int32)[..., None]
        element = self.element(blocks)
        shift = (byte - 127) << _bits.MANTISSA
        value = _bits.to_float(_bits.from_float(element) + shift)
        value = jnp.where(element == 0, 0, value)
        value = jnp.where(byte == 255, jnp.float32(jnp.nan), value)
        signed = jnp.where(blocks >> 3 == 1, -value, value)
        return self._from_blocks(narrow_exact(signed, dtype), length)

    def _live(self, scales: Array, outer_scale: Array | None) -> Array:
        del outer_scale
        return scales != 255


def narrow_exact(x: Array, dtype: DTypeLike) -> Array:
    """Casts float32 values of at most eight significant bits, subnormals included."""
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    upper = (lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


FORMAT = MXFP4()
