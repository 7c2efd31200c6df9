"""E4M3 (FN) magnitudes: NVFP4's block scales and FP8's elements.

Bytes 0..126 are 0 and the positive values up to 448 in order, 127 is nan. Subnormals are
multiples of 2^-9.
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import _bits

NAN_BYTE = 0x7F
MAX_BYTE = 0x7E
MAX = 448.0
Direction = Literal["nearest", "up", "down"]


def round_significand(whole: Array, exponent: Array, *, top: Array | int, to: Direction) -> Array:
    """Rounds `whole * 2^exponent` to a byte 0..126, saturating at 448.

    Args:
        whole: [...] uint32 below 2^31; its lowest bit may stand for a discarded remainder.
        exponent: [...] int32.
        top: position of the highest set bit of `whole`.
        to: nearest (ties to even), up or down.
    """
    shift = jnp.maximum(top - 3, -9 - exponent)
    near = jnp.minimum(shift, 31).astype(jnp.uint32)
    one = jnp.uint32(1)
    if to == "nearest":
        bump = (one << (near - one)) - one + ((whole >> near) & one)
    elif to == "up":
        bump = (one << near) - one
    else:
        bump = jnp.uint32(0)
    far = (whole > 0) if to == "up" else jnp.zeros_like(whole, bool)
    steps = jnp.where(shift > 31, far.astype(jnp.uint32), (whole + bump) >> near).astype(jnp.int32)
    return jnp.minimum(steps + jnp.maximum(exponent + top + 6, 0) * 8, MAX_BYTE)


def round_log(log: Array, *, to: Direction = "nearest") -> Array:
    """int32 byte of a magnitude in log form."""
    whole = _bits.significand(log).astype(jnp.uint32)
    return round_significand(whole, _bits.exponent(log) - 23, top=23, to=to)


def round_ratio(log: Array, divisor: Literal[4, 6], *, to: Direction) -> Array:
    """int32 byte of the exact quotient `value / divisor` (one rounding only).

    The same byte as rounding the float32 quotient: no float32 neighbour of a midpoint times
    `divisor` has its quotient rounded onto the midpoint.
    """
    if divisor == 4:
        return round_log(log - (2 << _bits.MANTISSA), to=to)
    numerator = _bits.significand(log).astype(jnp.uint32) << 7
    third = numerator // 3
    whole = (third << 1) | (third * 3 != numerator).astype(jnp.uint32)
    top = 29 + (whole >= (1 << 30)).astype(jnp.int32)
    return round_significand(whole, _bits.exponent(log) - 32, top=top, to=to)


def decode(byte: Array) -> Array:
    """float32 magnitude of a byte 0..127 (uint8 or int32); 127 decodes to nan."""
    byte = byte.astype(jnp.int32)
    normal = lax.bitcast_convert_type((byte << 20) + (120 << _bits.MANTISSA), jnp.float32)
    value = jnp.where(byte < 8, byte.astype(jnp.float32) * jnp.float32(2.0**-9), normal)
    return jnp.where(byte == NAN_BYTE, jnp.float32(jnp.nan), value)


def random_log(log: Array, random_bits: Array) -> Array:
    """int32 byte of a magnitude in log form, rounded up with the probability of its fraction.

    Uses at least 20 of the uint32 `random_bits`; the probability is exact to 2^-20 of a step.
    """
    whole = _bits.significand(log).astype(jnp.uint32)
    exponent = _bits.exponent(log) - 23
    shift = jnp.maximum(20, -9 - exponent)
    near = jnp.minimum(shift, 31).astype(jnp.uint32)
    whole = whole >> jnp.minimum(shift - near.astype(jnp.int32), 31).astype(jnp.uint32)
    noise = random_bits & ((jnp.uint32(1) << near) - jnp.uint32(1))
    steps = ((whole + noise) >> near).astype(jnp.int32)
    return jnp.minimum(steps + jnp.maximum(exponent + 29, 0) * 8, MAX_BYTE)
