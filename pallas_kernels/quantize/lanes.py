"""Lanes of uint32 and float32 as the encoders see them, in jnp.

An encoder takes its arithmetic from such an object, so that one source runs on whole arrays
(`Arrays`, here) and in the registers of a GPU's lanes (`registers.Registers`). Values add, shift
and compare with Python's operators; what has no operator is a method. Magnitudes are bit patterns
without sign, in uint32, ordered as the values are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array

MANTISSA = 23
EXPONENT_MASK = 0x7F800000
MAGNITUDE_MASK = 0x7FFFFFFF
SIGN_MASK = np.uint32(0x80000000)
#: The upper half of a word: a bfloat16 as float32.
UPPER = np.uint32(0xFFFF0000)
#: Magnitudes from here on are infinities and nans.
INFINITY = 0x7F800000
NAN = 0x7FC00000


class Arrays:
    """The lanes as arrays of any shape.

    XLA's CPU code flushes float32 subnormals to zero, so what may meet one is done on integers.
    """

    def uint(self, value: int) -> np.uint32:
        """A constant."""
        return np.uint32(value)

    def real(self, value: float) -> np.float32:
        """A constant."""
        return np.float32(value)

    def bits(self, x: Array) -> Array:
        """float32 -> its pattern."""
        return lax.bitcast_convert_type(x, jnp.uint32)

    def value(self, x: Array) -> Array:
        """A pattern -> float32."""
        return lax.bitcast_convert_type(x, jnp.float32)

    def where(self, condition: Array, yes: Array, no: Array) -> Array:
        """Selects."""
        return jnp.where(condition, yes, no)

    def equal(self, a: Array, b: Array) -> Array:
        """Whether two uint32 are equal."""
        return a == b

    def largest(self, a: Array, b: Array) -> Array:
        """The larger of two uint32, or of two float32 neither of which is nan."""
        return jnp.maximum(a, b)

    def smallest(self, a: Array, b: Array) -> Array:
        """The smaller of two uint32, or of two float32 neither of which is nan."""
        return jnp.minimum(a, b)

    def reciprocal(self, x: Array) -> Array:
        """1 / x within two units in the last place, for x in [2^-60, 2^60]."""
        return 1 / x

    def over_power(self, magnitude: Array, biased: Array) -> Array:
        """Magnitude * 2^(127 - biased) as float32, biased in 1..253; nothing of nan patterns.

        Exact where the result lies in [2^-60, 2^60]; smaller ones become zero or tiny, larger huge.
        """
        whole = magnitude.astype(jnp.int32)
        normalised = lax.bitcast_convert_type(whole.astype(jnp.float32), jnp.int32) - (149 << MANTISSA)
        log = jnp.where(whole < 1 << MANTISSA, normalised, whole)
        k = biased.astype(jnp.int32) - 127
        low, high = (k + 65) << MANTISSA, jnp.minimum(k + 189, 255) << MANTISSA
        result = lax.bitcast_convert_type(jnp.clip(log, low, high) - (k << MANTISSA), jnp.float32)
        return jnp.where(magnitude == 0, 0.0, result)

    def power(self, biased: Array) -> Array:
        """2^(biased - 127) as `times_power` takes it: biased in 0..254, nan for 255."""
        return biased

    def times_power(self, x: Array, power: Array) -> Array:
        """x times a `power`, for x zero or of at most four bits in [2^-3, 2^3]: exact."""
        pattern = lax.bitcast_convert_type(x, jnp.int32)
        field = (pattern >> MANTISSA) + power.astype(jnp.int32) - 127
        fraction = pattern & ((1 << MANTISSA) - 1)
        subnormal = (fraction | (1 << MANTISSA)) >> jnp.clip(1 - field, 0, 31)
        result = jnp.where(field >= 1, (field << MANTISSA) | fraction, subnormal)
        result = jnp.where(power == 255, NAN, jnp.where(x == 0, 0, result))
        return self.value(result.astype(jnp.uint32))

    def product_down(self, a: Array, b: Array) -> Array:
        """a * b, both >= 0 and b of at most 8 bits, rounded towards zero to 24 bits."""
        product = a * b
        return jnp.where(self._error(a, b, product) < 0, self.value(self.bits(product) - 1), product)

    def lost(self, a: Array, b: Array, product: Array) -> Array:
        """Whether a * b, as in `product_down`, is not exactly `product`."""
        return self._error(a, b, product) != 0

    def _error(self, a: Array, b: Array, product: Array) -> Array:
        """a * b - product, exactly: 12 bits times 8, twice."""
        high = self.value(self.bits(a) & np.uint32(0xFFFFF000))
        return (high * b - product) + (a - high) * b

    def round_half_up(self, a: Array, b: Array) -> Array:
        """min(floor(a * b + 1/2), 7) as float32, exactly; a >= 0, b >= 0 of at most 8 bits."""
        product = self.product_down(jnp.minimum(a, self.real(2.0**80)), b)
        floor = jnp.floor(product)
        return jnp.minimum(jnp.where(product - floor >= 0.5, floor + 1, floor), 7.0)
