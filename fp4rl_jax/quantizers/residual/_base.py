"""What every selection of residual elements answers; one file of this folder defines one.

A selection is a frozen dataclass: hashable, printable, static under jit, equal by value.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats._base import once

#: The names of "I = the elements are chosen before the residual is quantized" and its opposite.
Order = Literal["select_first", "quantize_first"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Chooses which elements of a residual [M, K] take part in the second term."""

    @property
    def name(self) -> str:
        """The name it is found by: that of its file."""
        return type(self).__module__.rsplit(".", 1)[-1]

    @property
    def batch_invariant(self) -> bool:
        """Whether what is kept of a token depends on that token (and static data) only."""
        raise NotImplementedError

    @property
    def needs_columns(self) -> bool:
        """Whether the columns are given by the caller: chosen at publish, from running statistics."""
        return False

    def kept_share(self, length: int, block: int) -> float:
        """Share of the elements of a row of `length` that are kept, on average over tokens.

        Args:
            length: K. block: elements that share a block scale of the residual's format.
        """
        raise NotImplementedError

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        """Which elements are kept.

        Args:
            residual: [M, K] float32: the residual, or its quantized values where those come first.
            x: [M, K] float32, the activations.
            block: elements that share a block scale of the residual's format.

        Returns:
            bool, broadcastable to [M, K].
        """
        raise NotImplementedError


def runs(x: Array, length: int) -> Array:
    """[..., K] -> [..., ceil(K / length), length], the last run padded with zeros."""
    missing = -x.shape[-1] % length
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return padded.reshape(*x.shape[:-1], -1, length)


def unrun(x: Array, length: int) -> Array:
    """The inverse of `runs`: [..., n, run] -> [..., length]."""
    return x.reshape(*x.shape[:-2], -1)[..., :length]


def largest_two_of_four(magnitude: Array, *, stride: int = 1) -> Array:
    """bool, True at the two largest of every four consecutive units of the last axis.

    Ties go to the lower index, by counting who comes before whom: no sort, no float arithmetic. The
    neighbours at distance 1 to 3 are read by shifting whole rows, which runs in vectors where a last axis
    of four would not.

    Args:
        magnitude: [..., K] non-negative float32, equal within a unit; a short last run keeps two at most.
        stride: elements of a unit.
    """
    length, edge = magnitude.shape[-1], 3 * stride
    place = jnp.arange(length) // stride % 4
    sides = [(0, 0)] * (magnitude.ndim - 1) + [(edge, edge)]
    padded = once(jnp.pad(magnitude, sides, constant_values=-1.0))
    before = jnp.zeros(magnitude.shape, jnp.int32)
    for distance in (-3, -2, -1, 1, 2, 3):
        first = edge + stride * distance
        other = padded[..., first : first + length]
        wins = (other >= magnitude) if distance < 0 else (other > magnitude)
        inside = (place + distance >= 0) & (place + distance < 4)
        before += (wins & inside).astype(jnp.int32)
    return before < 2


def with_partner(x: Array) -> Array:
    """Sums of adjacent pairs of the last axis, at both elements of each: [..., K], K even."""
    padded = once(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 1)]))
    first = jnp.arange(x.shape[-1]) % 2 == 0
    return x + jnp.where(first, padded[..., 2:], padded[..., :-2])


def ordered_sum(x: Array) -> Array:
    """Sums the last axis by halving, in one order whatever surrounds it; zeros pad a power of two."""
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = once(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def number_kept(ratio: float, units: int) -> int:
    """How many of `units` a ratio keeps: the nearest number (a half goes up), at least one."""
    return max(1, min(units, int(ratio * units + 0.5)))


def top(scores: Array, count: int) -> Array:
    """Indices [..., count] int32, ascending, of the largest scores; ties go to the lower index."""
    order = jnp.argsort(-scores, axis=-1, stable=True)[..., :count]
    return jnp.sort(order, axis=-1).astype(jnp.int32)


#: Units of a row up to which `largest` counts: for more of them a sort is less work and a smaller program.
COUNTED = 128


def largest(scores: Array, count: int) -> Array:
    """bool [..., units], True at the `count` largest of non-negative scores; ties go to the lower index.

    The same units as `top` gives, by counting for each how many come before it: a few vector instructions
    where a sort of many short rows takes scalar ones.
    """
    units = scores.shape[-1]
    if units > COUNTED:
        dropped = jnp.zeros(scores.shape, bool)
        return jnp.put_along_axis(dropped, top(scores, count), True, axis=-1, inplace=False)
    place = jnp.arange(units)
    before = jnp.zeros(scores.shape, jnp.int32)
    for other in range(units):
        score = scores[..., other : other + 1]
        before += jnp.where(place > other, score >= scores, score > scores).astype(jnp.int32)
    return before < count
