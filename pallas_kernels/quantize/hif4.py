"""HiF4 activations: S1P2 elements under E6M2 a block of 64, a factor an 8 and a factor a 4; no outer scale.

The published conversion goes through two bfloat16 values, bf16(1/7) and bf16(1 / E6M2), whose
products with an input are compared exactly: rounded down, a product stays on its side of a threshold.
"""

from typing import Any

from pallas_kernels.quantize.lanes import INFINITY, MANTISSA, NAN, SIGN_MASK

Lanes = Any

NAME, BLOCK, SCALE_WIDTH, OUTER = "hif4", 64, 4, False
#: All 24 bits of a float32 input are looked at.
NARROW = False
_SEVENTH = 73 / 512  # bfloat16(1/7)
#: Fractions of bfloat16(1 / m) for the E6M2 significands 1, 1.25, 1.5 and 1.75.
_RECIPROCALS = (0x000000, 0x4D0000, 0x2B0000, 0x120000)


def scale(ops: Lanes, amax: Lanes, rule: str) -> dict[str, Lanes]:
    """Of blocks with the given largest magnitude: E6M2 and its bfloat16 reciprocal, as float32."""
    del rule
    bounded = ops.value(ops.smallest(amax, ops.uint(0x7F000000)))
    seventh = _round_even(ops, ops.bits(_to_odd_product(ops, bounded)), 16)
    pattern = _round_even(ops, seventh, 21)
    pattern = ops.smallest(ops.largest(pattern, ops.uint((127 - 48) << 23)), ops.uint(0x47400000))
    poisoned = amax >= ops.uint(INFINITY)
    m = (pattern >> 21) & 3
    fraction = ops.uint(_RECIPROCALS[0])
    for i in (1, 2, 3):
        fraction = ops.where(ops.equal(m, ops.uint(i)), ops.uint(_RECIPROCALS[i]), fraction)
    less = ops.where(ops.equal(m, ops.uint(0)), ops.uint(0), ops.uint(1))
    inverse = ((254 - (pattern >> MANTISSA) - less) << MANTISSA) | fraction
    return {
        "value": ops.where(poisoned, ops.value(ops.uint(NAN)), ops.value(pattern)),
        "inverse": ops.value(inverse),
        "sign": ops.where(poisoned, ops.uint(0), ops.uint(SIGN_MASK)),
    }


def factor(ops: Lanes, amax: Lanes, scale: dict[str, Lanes], threshold: float, unit: Lanes) -> Lanes:
    """1 or 2 as float32: 2 where the largest magnitude of a group, over E6M2 and `unit`, reaches it."""
    bounded = ops.value(ops.smallest(amax, ops.uint(0x7F000000)))
    reached = ops.product_down(bounded, scale["inverse"]) >= ops.real(threshold) * unit
    return ops.where(reached, ops.real(2.0), ops.real(1.0))


def element(ops: Lanes, magnitude: Lanes, scale: dict[str, Lanes], fine: Lanes) -> Lanes:
    """float32 codes 0..7 (quarters) of the elements; `fine` is the product of their two factors."""
    four = ops.value(ops.uint(0x80000000) - ops.bits(fine))  # 4 / fine, both powers of two
    return ops.round_half_up(ops.value(magnitude), scale["inverse"] * four)


def product(ops: Lanes, element: Lanes, scale: dict[str, Lanes], fine: Lanes) -> Lanes:
    """Element times its scales."""
    return element * (scale["value"] * (fine * ops.real(0.25)))


def code(ops: Lanes, element: Lanes) -> Lanes:
    """Magnitude codes 0..7."""
    return ops.bits(element + ops.real(2.0**23)) & 7


def scale_bytes(ops: Lanes, scale: dict[str, Lanes]) -> Lanes:
    """E6M2 byte of the block scales; 0xFF where poisoned."""
    value = scale["value"]
    byte = (ops.bits(value) >> 21) - ((127 - 48) << 2)
    return ops.where(value > ops.real(0.0), byte, ops.uint(0xFF))


def _to_odd_product(ops: Lanes, x: Lanes) -> Lanes:
    """x * bf16(1/7): rounded down, its last bit set where something was lost."""
    down = ops.product_down(x, ops.real(_SEVENTH))
    lost = ops.lost(x, ops.real(_SEVENTH), down)
    return ops.where(lost, ops.value(ops.bits(down) | 1), down)


def _round_even(ops: Lanes, pattern: Lanes, dropped: int) -> Lanes:
    """Rounds a pattern to `dropped` fewer fraction bits, ties to even."""
    odd = (pattern >> dropped) & 1
    half = (1 << (dropped - 1)) - 1
    return (pattern + odd + half) & ops.uint((0xFFFFFFFF >> dropped) << dropped)
