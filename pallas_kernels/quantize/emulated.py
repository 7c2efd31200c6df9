"""A GPU's lanes in numpy: every value is an array with one entry a thread of the whole grid.

The same source runs here and in `registers.Registers`, operation by operation, so that addresses,
shuffles and roundings are compared on a machine without GPU. numpy keeps subnormals and rounds every
float32 operation to nearest, as the GPU does; products and sums that it rounds towards zero are
formed in float64, exactly.
"""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.quantize.lanes import UPPER

Array = np.ndarray


@dataclasses.dataclass
class Words:
    """An array as uint32 words, written in place."""

    words: Array


class Emulated:
    """`registers.Registers` for all threads of a grid at once; see there for what the methods do."""

    def __init__(self, grid: int, threads: int) -> None:
        self.grid, self.threads = grid, threads

    def uint(self, value: int) -> np.uint32:
        return np.uint32(value)

    def real(self, value: float) -> np.float32:
        return np.float32(value)

    def bits(self, x: Array) -> Array:
        return np.asarray(x, np.float32).view(np.uint32)

    def value(self, x: Array) -> Array:
        return np.asarray(x, np.uint32).view(np.float32)

    def where(self, condition: Array, yes: Array, no: Array) -> Array:
        return np.where(condition, yes, no)

    def equal(self, a: Array, b: Array) -> Array:
        return a == b

    def both(self, a: Array, b: Array) -> Array:
        return a & b

    def largest(self, a: Array, b: Array) -> Array:
        return np.fmax(a, b)

    def smallest(self, a: Any, b: Any) -> Array:
        return np.fmin(a, b)

    def reciprocal(self, x: Array) -> Array:
        exact = np.float32(1) / x
        return self.value(self.bits(exact) + np.uint32(1))  # one unit off, as the GPU's may be

    def over_power(self, magnitude: Array, biased: Array) -> Array:
        return self.value(magnitude) * self.value((254 - biased) << 23)

    def power(self, biased: Array) -> Array:
        subnormal_or_more = np.where(biased == 0, np.uint32(1 << 22), biased << 23)
        return self.value(np.where(biased == 255, np.uint32(0x7FC00000), subnormal_or_more))

    def times_power(self, x: Array, power: Array) -> Array:
        return x * power

    def product_down(self, a: Array, b: Array) -> Array:
        return _towards_zero(np.float64(a) * np.float64(b))

    def lost(self, a: Array, b: Array, product: Array) -> Array:
        return np.float64(a) * np.float64(b) != np.float64(product)

    def round_half_up(self, a: Array, b: Array) -> Array:
        # float64 has no 53 bits too few: values beyond 2^30 end at the bound, small ones are below a half
        product = np.float64(a) * np.float64(b)
        halves = _towards_zero(np.minimum(product, 2.0**24) + (2.0**22 + 0.5))
        halves = self.smallest(halves, np.float32(2.0**22 + 7.5))
        return self.value(self.bits(halves) & np.uint32(0xFFFFFFFE)) - np.float32(2.0**22)

    # ---- between lanes ---------------------------------------------------------------------------
    def thread(self) -> Array:
        return np.tile(np.arange(self.threads, dtype=np.uint32), self.grid)

    def block(self) -> Array:
        return np.repeat(np.arange(self.grid, dtype=np.uint32), self.threads)

    def from_lane(self, x: Array, distance: int) -> Array:
        return np.flip(x.reshape(-1, 2, distance), axis=1).reshape(-1)

    def largest_of_warp(self, x: Array) -> Array:
        return np.repeat(x.reshape(-1, 32).max(axis=1), 32)

    def largest_of_block(self, x: Array, scratch: None, warps: int, which: int) -> Array:
        del scratch, which
        assert warps * 32 == self.threads
        return np.repeat(x.reshape(self.grid, self.threads).max(axis=1), self.threads)

    def largest_halves(self, a: Array, b: Array) -> Array:
        return np.maximum(a & UPPER, b & UPPER) | np.maximum(a & 0xFFFF, b & 0xFFFF)

    def halves_to_word(self, low: Array, high: Array) -> Array:
        return (low >> 16) | (high & UPPER)

    # ---- memory ----------------------------------------------------------------------------------
    def load(self, ref: Words, index: Array, count: int, valid: Array | None) -> list[Array]:
        _check_aligned(index, count, valid)
        if valid is None:
            return [ref.words[index + i] for i in range(count)]
        index = np.where(valid, index, 0)
        return [np.where(valid, ref.words[index + i], np.uint32(0)) for i in range(count)]

    def store(self, ref: Words, index: Array, words: list[Array], valid: Array | None) -> None:
        _check_aligned(index, len(words), valid)
        valid = np.ones(self.grid * self.threads, bool) if valid is None else valid
        index = np.broadcast_to(index, valid.shape)
        for i, word in enumerate(words):
            ref.words[index[valid] + i] = np.broadcast_to(word, valid.shape)[valid]


def _check_aligned(index: Array, count: int, valid: Array | None) -> None:
    """The GPU moves up to four words at once, from an address that is a multiple of their size."""
    wrong = np.asarray(index) % min(count, 4) != 0
    assert not np.any(wrong if valid is None else wrong & valid), (count, np.asarray(index)[:8])


def _towards_zero(x: Any) -> Array:
    """float64 >= 0 -> float32, rounded down."""
    near = x.astype(np.float32)
    return np.where(near.astype(np.float64) > x, np.nextafter(near, np.float32(0)), near)
