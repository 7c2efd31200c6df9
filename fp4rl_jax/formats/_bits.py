"""Exact arithmetic on the bit patterns of float32 magnitudes.

Every decision of an encoder (a code, a scale byte, an outer scale) is taken here on integers, so
no compiler can fold it away, contract it into a fused multiply-add or flush it to zero, and
float32 and bfloat16 inputs of equal value cannot differ. Two integer forms of |x| are used:

- raw: the float32 bit pattern without its sign. Orders like |x|; infinities and nans come last.
- log form: the raw pattern with subnormals normalised, their exponent going below zero. It is an
  int32 whose upper part is the biased exponent and whose low 23 bits are the significand, so that
  multiplying by 2^k is the integer addition of `k << 23`. Zero maps below every subnormal.
"""

import jax.numpy as jnp
from jax import lax

from fp4rl_jax.arrays import Array

MANTISSA = 23
BIAS = 127
#: raw patterns from here on are infinities and nans.
RAW_INFINITY = 0x7F800000
RAW_MAX = 0x7F7FFFFF
_FRACTION = (1 << MANTISSA) - 1
#: 2^k in log form is `(k + BIAS) << MANTISSA`; this is 1.0.
ONE = BIAS << MANTISSA


def raw(x: Array) -> Array:
    """int32 bit pattern of |x| as a float32; `x` is float32 or bfloat16, any shape."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
        return (bits & 0x7FFF) << 16
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def negative(x: Array) -> Array:
    """bool, True where the sign bit of `x` (float32 or bfloat16) is set, -0 and nan included."""
    width = jnp.int16 if x.dtype == jnp.bfloat16 else jnp.int32
    return lax.bitcast_convert_type(x, width) < 0


def log_form(bits: Array) -> Array:
    """Raw pattern -> log form. Subnormals go through their exact integer significand."""
    as_integer = bits.astype(jnp.float32)  # bits < 2^23 is exact: |x| in units of 2^-149
    normalised = lax.bitcast_convert_type(as_integer, jnp.int32) - (149 << MANTISSA)
    return jnp.where(bits <= _FRACTION, normalised, bits)


def exponent(log: Array) -> Array:
    """Unbiased exponent e of a log form: 2^e <= value < 2^(e+1)."""
    return (log >> MANTISSA) - BIAS


def significand(log: Array) -> Array:
    """Integer significand in [2^23, 2^24) of a log form."""
    return (log & _FRACTION) | (1 << MANTISSA)


def unit(log: Array) -> Array:
    """The significand as a float32 in [1, 2)."""
    return lax.bitcast_convert_type((log & _FRACTION) | ONE, jnp.float32)


def scaled(log: Array, k: Array | int) -> Array:
    """value * 2^-k as a non-negative float32, exact where the result lies in [2^-60, 2^60].

    Smaller results, zero among them, become a tiny positive number, larger ones a huge one: the
    caller compares the result with grid points, none of which lie out there.
    """
    k = jnp.asarray(k, jnp.int32)
    low = (k + (BIAS - 62)) << MANTISSA
    high = jnp.minimum(k + (BIAS + 62), 255) << MANTISSA
    return lax.bitcast_convert_type(jnp.clip(log, low, high) - (k << MANTISSA), jnp.float32)


def multiply(a: Array, b: Array) -> Array:
    """Log form of the product of two log forms, rounded to 24 bits (nearest even).

    The exponent is not bounded by float32's; it is clipped far outside its range.
    """
    product = lax.bitcast_convert_type(unit(a) * unit(b), jnp.int32)
    shift = (a >> MANTISSA) + (b >> MANTISSA) - 2 * BIAS
    log = product + (jnp.clip(shift, -370, 127) << MANTISSA)
    return jnp.where(shift > 127, RAW_INFINITY, log)  # 2^128 and more, which no int32 log form holds


def divide(a: Array, b: Array) -> Array:
    """Log form of the float32-rounded (nearest even) quotient of two log forms, by long division.

    The float32 division of a GPU may be off by an ulp, and division by a constant is folded into
    a multiplication everywhere; integer division is neither.
    """
    numerator, denominator = jnp.broadcast_arrays(significand(a), significand(b))
    short = (numerator < denominator).astype(jnp.int32)  # quotient below 1: one bit more
    remainder = (numerator << short).astype(jnp.uint32)
    denominator = denominator.astype(jnp.uint32)
    quotient = remainder // denominator  # 1: the leading bit
    remainder = remainder - quotient * denominator
    for _ in range(3):  # 3 x 8 bits: 24 fraction bits, one more than kept
        shifted = remainder << 8
        digit = shifted // denominator
        quotient = (quotient << 8) | digit
        remainder = shifted - digit * denominator
    sticky = (remainder != 0).astype(jnp.uint32)
    rounded = ((quotient >> 1) + (quotient & 1 & ((quotient >> 1) | sticky))).astype(jnp.int32)
    field = jnp.clip((a >> MANTISSA) - (b >> MANTISSA) - short + BIAS, -240, 255)
    log = rounded + ((field - 1) << MANTISSA)  # a carry moves into the exponent by itself
    return jnp.where(field > 254, RAW_INFINITY, log)


def to_float(log: Array) -> Array:
    """float32 of a log form; subnormal results are rounded to nearest even, larger ones are inf."""
    field = log >> MANTISSA
    shift = jnp.clip(1 - field, 0, 31)
    whole = significand(log)
    tie_bit = (whole >> shift) & 1
    half_less = jnp.where(shift > 0, (1 << jnp.maximum(shift - 1, 0)) - 1, 0)
    subnormal = jnp.where(shift > 24, 0, (whole + half_less + jnp.where(shift > 0, tie_bit, 0)) >> shift)
    bits = jnp.where(field >= 1, jnp.minimum(log, RAW_INFINITY), subnormal)
    return lax.bitcast_convert_type(bits, jnp.float32)


def from_float(x: Array) -> Array:
    """Log form of a finite float32 or bfloat16 magnitude."""
    return log_form(raw(x))


def power_of_two(k: Array) -> Array:
    """float32 2^k for integer -126 <= k <= 127."""
    return lax.bitcast_convert_type((k + BIAS) << MANTISSA, jnp.float32)


def block_amax(x: Array) -> Array:
    """[..., n] float32 or bfloat16 -> [...] int32 raw pattern of the largest magnitude.

    A nan wins over an infinity, and both over every finite value. Reduced in ways that the CPU
    compiler turns into vector instructions: bfloat16 in its 16 bits, float32 by sixteens.
    """
    if x.dtype == jnp.bfloat16:
        largest = (lax.bitcast_convert_type(x, jnp.int16) & 0x7FFF).max(axis=-1, initial=0)
        return lax.optimization_barrier(largest).astype(jnp.int32) << 16  # stored, or each use computes it
    bits = raw(x)
    while bits.shape[-1] > 16 and bits.shape[-1] % 16 == 0:
        bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 16, 16).max(axis=-1)
    return bits.max(axis=-1, initial=0)


def opaque(x: Array) -> Array:
    """A positive float32 that the compiler may not fuse with what follows (no multiply-add)."""
    return lax.bitcast_convert_type(jnp.maximum(lax.bitcast_convert_type(x, jnp.int32), 1), jnp.float32)
