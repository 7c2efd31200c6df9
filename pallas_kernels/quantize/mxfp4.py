"""MXFP4 activations: E2M1 elements under a power-of-two scale a block of 32; no outer scale.

Thresholds have at most five significant bits, so a float32 input is first rounded to odd at eight.
"""

from typing import Any

from pallas_kernels.quantize.lanes import INFINITY, MANTISSA, SIGN_MASK
from pallas_kernels.quantize.nvfp4 import code, e2m1

Lanes = Any

NAME, BLOCK, SCALE_WIDTH, OUTER = "mxfp4", 32, 1, False
#: Eight significant bits decide everything.
NARROW = True
#: Fractions (of 2^23) of the block maximum above which its exponent grows by one.
RULES = {"floor": 1 << 23, "even": (3 << 21) - 1, "rceil": 1 << 22, "ceil": 0, "uos": 13 << 19}

__all__ = ["code", "element", "product", "scale", "scale_bytes"]


def scale(ops: Lanes, amax: Lanes, outer: Lanes, rule: str) -> dict[str, Lanes]:
    """Of blocks with the given largest magnitude: the E8M0 byte and what the elements need."""
    del outer
    fraction = amax & ((1 << MANTISSA) - 1)
    grows = ops.where(fraction > ops.uint(RULES[rule]), ops.uint(1), ops.uint(0))
    byte = ops.largest((amax >> MANTISSA) + grows, ops.uint(2)) - 2
    poisoned = amax >= ops.uint(INFINITY)
    byte = ops.where(poisoned, ops.uint(0xFF), byte)
    return {
        "byte": byte,
        "power": ops.power(byte),
        "sign": ops.where(poisoned, ops.uint(0), ops.uint(SIGN_MASK)),
    }


def element(ops: Lanes, magnitude: Lanes, scale: dict[str, Lanes], outer: Lanes) -> Lanes:
    """float32 magnitudes of the elements, on E2M1's grid."""
    del outer
    return e2m1(ops, ops.over_power(magnitude, scale["byte"]))


def product(ops: Lanes, element: Lanes, scale: dict[str, Lanes]) -> Lanes:
    """Element times block scale."""
    return ops.times_power(element, scale["power"])


def scale_bytes(ops: Lanes, scale: dict[str, Lanes]) -> Lanes:
    """E8M0 byte of the block scales; 0xFF where poisoned."""
    del ops
    return scale["byte"]
