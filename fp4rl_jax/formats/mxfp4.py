"""MXFP4 (OCP MX 1.0): 32 E2M1 elements under one E8M0 power-of-two scale, 4.25 bits a value."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits
from fp4rl_jax.formats._base import Format, choices
from fp4rl_jax.formats._grid import E2M1, Grid

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
    scale_kind: ClassVar[str] = "E8M0"
    power_of_two_scale: ClassVar[bool] = True

    @property
    def block(self) -> int:
        return 32

    @property
    def has_ladder(self) -> bool:
        return True

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
        byte = scales.astype(jnp.int32)
        bits = jnp.where(byte == 0, 1 << 22, byte << _bits.MANTISSA)  # 2^-127 is subnormal
        value = lax.bitcast_convert_type(bits, jnp.float32)
        return jnp.where(byte == 255, jnp.float32(jnp.nan), value)


FORMAT = MXFP4()
