"""Float32 magnitudes as integers, for the reference: no compiler folds, contracts or flushes these.

The log form of a magnitude is its float32 pattern with subnormals normalised, their exponent going
below zero: an int32 ordered as the values, in which multiplying by 2^k adds `k << 23`.
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

MANTISSA = 23
FRACTION = (1 << MANTISSA) - 1
ONE = 127 << MANTISSA
INFINITY = 0x7F800000


def log_form(x: Array) -> Array:
    """|x| of float32 or bfloat16, finite or not; zero lies below every other value."""
    pattern = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    if x.dtype == jnp.bfloat16:  # a cast may flush subnormals
        pattern = (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) & 0x7FFF) << 16
    normalised = lax.bitcast_convert_type(pattern.astype(jnp.float32), jnp.int32) - (149 << MANTISSA)
    return jnp.where(pattern <= FRACTION, normalised, pattern)


def exponent(log: Array) -> Array:
    """e of 2^e <= value < 2^(e + 1)."""
    return (log >> MANTISSA) - 127


def significand(log: Array) -> Array:
    """uint32 in [2^23, 2^24)."""
    return ((log & FRACTION) | (1 << MANTISSA)).astype(jnp.uint32)


def power(k: Array) -> Array:
    """float32 2^k for -126 <= k <= 127."""
    return lax.bitcast_convert_type((k + 127) << MANTISSA, jnp.float32)


def to_float(log: Array) -> Array:
    """float32 of a log form; subnormal results rounded to nearest even, larger than float32's are inf."""
    field = log >> MANTISSA
    whole = significand(log).astype(jnp.int32)
    shift = jnp.clip(1 - field, 1, 25)
    subnormal = (whole + ((1 << (shift - 1)) - 1) + ((whole >> shift) & 1)) >> shift
    pattern = jnp.where(field >= 1, jnp.minimum(log, INFINITY), subnormal)
    return lax.bitcast_convert_type(pattern, jnp.float32)


def multiply(a: Array, b: Array) -> Array:
    """Log form of the product, rounded to nearest even as float32 rounds."""
    units = [lax.bitcast_convert_type((x & FRACTION) | ONE, jnp.float32) for x in (a, b)]
    shift = (a >> MANTISSA) + (b >> MANTISSA) - 254
    product = lax.bitcast_convert_type(units[0] * units[1], jnp.int32)
    return jnp.where(shift > 127, INFINITY, product + (jnp.clip(shift, -370, 127) << MANTISSA))


def divide(a: Array, b: Array) -> Array:
    """Log form of the quotient, rounded to nearest even, by long division."""
    numerator, denominator = jnp.broadcast_arrays(significand(a), significand(b))
    short = (numerator < denominator).astype(jnp.uint32)
    remainder = numerator << short
    quotient = remainder // denominator
    remainder = remainder - quotient * denominator
    for _ in range(3):
        digit = (remainder << 8) // denominator
        quotient, remainder = (quotient << 8) | digit, (remainder << 8) - digit * denominator
    half, odd = quotient & 1, (quotient >> 1) & 1
    rounded = (quotient >> 1) + (half & (odd | (remainder != 0).astype(jnp.uint32)))
    field = jnp.clip((a >> MANTISSA) - (b >> MANTISSA) - short.astype(jnp.int32) + 127, -240, 255)
    return jnp.where(field > 254, INFINITY, rounded.astype(jnp.int32) + ((field - 1) << MANTISSA))
