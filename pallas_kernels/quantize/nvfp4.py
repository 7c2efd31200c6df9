"""NVFP4 activations: E2M1 elements, an E4M3 scale a block of 16, a power-of-two outer scale a row.

Every threshold of this format (an element's, a scale's, the outer scale's) has at most seven
significant bits, so a float32 input is first rounded to odd at eight: no comparison changes. A
quotient of such values is either a threshold or 2^-9 away from it, so approximate reciprocals are
right once the quotient is rounded to 16 bits.
"""

from typing import Any

from pallas_kernels.quantize.lanes import EXPONENT_MASK, INFINITY, MANTISSA, NAN, SIGN_MASK

Lanes = Any

NAME, BLOCK, SCALE_WIDTH, OUTER = "nvfp4", 16, 1, True
#: Eight significant bits decide everything.
NARROW = True
_SIXTH = 1 / 6
_OUTER_FRACTION = 0x280000  # 2688 = 1.3125 * 2^11


def outer_exponent(ops: Lanes, amax: Lanes) -> Lanes:
    """Biased exponent of the smallest 2^k >= 2^-126 with amax <= 2688 * 2^k; of 1 for amax 0."""
    fraction = amax & ((1 << MANTISSA) - 1)
    more = ops.where(fraction > ops.uint(_OUTER_FRACTION), ops.uint(1), ops.uint(0))
    biased = ops.largest((amax >> MANTISSA) + more, ops.uint(12)) - 11
    return ops.where(ops.equal(amax, ops.uint(0)), ops.uint(127), biased)


def scale(ops: Lanes, amax: Lanes, outer: Lanes, rule: str) -> dict[str, Lanes]:
    """Of blocks with the given largest magnitude: the E4M3 scale and what the elements need."""
    del rule
    sixth = _sixteen_bits(ops, ops.over_power(amax, outer) * ops.real(_SIXTH))
    sixth = ops.smallest(sixth, ops.real(448.0))
    # to three fraction bits, in steps of 2^-9 at least: the sum's last place is a step
    place = (ops.bits(ops.largest(sixth, ops.real(2.0**-6))) & EXPONENT_MASK) + 0x0A400000
    value = (sixth + ops.value(place)) - ops.value(place)
    alive = value > ops.real(0.0)
    inverse = ops.where(alive, ops.reciprocal(value), ops.real(0.0))
    poisoned = amax >= ops.uint(INFINITY)
    return {
        "value": ops.where(poisoned, ops.value(ops.uint(NAN)), value),
        "inverse": inverse,
        "sign": ops.where(poisoned, ops.uint(0), ops.where(alive, ops.uint(SIGN_MASK), ops.uint(0))),
    }


def element(ops: Lanes, magnitude: Lanes, scale: dict[str, Lanes], outer: Lanes) -> Lanes:
    """float32 magnitudes of the elements, on E2M1's grid."""
    quotient = ops.over_power(magnitude, outer) * scale["inverse"]
    return e2m1(ops, _sixteen_bits(ops, quotient))


def e2m1(ops: Lanes, x: Lanes) -> Lanes:
    """Rounds to 0, 0.5, 1, 1.5, 2, 3, 4 or 6, ties to the even code."""
    x = ops.smallest(x, ops.real(6.0))
    # to one fraction bit, in steps of 0.5 at least
    place = (ops.bits(ops.largest(x, ops.real(1.0))) & EXPONENT_MASK) + 0x0B400000
    return (x + ops.value(place)) - ops.value(place)


def product(ops: Lanes, element: Lanes, scale: dict[str, Lanes]) -> Lanes:
    """Element times block scale."""
    del ops
    return element * scale["value"]


def code(ops: Lanes, element: Lanes) -> Lanes:
    """Magnitude codes 0..7 of elements on the grid."""
    above = (ops.bits(element) >> 22) - 252
    below = ops.where(element > ops.real(0.0), ops.uint(1), ops.uint(0))
    return ops.where(element >= ops.real(1.0), above, below)


def scale_bytes(ops: Lanes, scale: dict[str, Lanes]) -> Lanes:
    """E4M3 byte of the block scales; 0x7F where poisoned."""
    value = scale["value"]
    normal = (ops.bits(value) >> 20) - (120 << 3)
    subnormal = ops.bits(value + ops.real(2.0**14)) & 7
    byte = ops.where(value < ops.real(2.0**-6), subnormal, normal)
    return ops.where(value >= ops.real(0.0), byte, ops.uint(0x7F))


def _sixteen_bits(ops: Lanes, x: Lanes) -> Lanes:
    """Rounds to 16 significant bits."""
    return ops.value((ops.bits(x) + 0x80) & ops.uint(0xFFFFFF00))
