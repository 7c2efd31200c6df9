"""Sums that carry their denominator, and stay the same however a batch is split.

A mean over a batch that is processed in microbatches, or on several devices, is one division at
the very end: every part returns (sum, count), parts are merged, the caller divides once. Two
properties make the result independent of the split:

* counts are int32, hence exact;
* sums are accumulated in two float32 words (Knuth's TwoSum over a fixed binary tree), so the
  order in which rows meet does not reach the result. A policy loss is a sum with heavy
  cancellation (group advantages sum to zero), where a plain float32 sum in another order can
  differ in every digit.

The tree is written as elementwise additions of halves, so it also means the same on an array
that is sharded over devices.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Literal

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array, PyTree

Reduction = Literal["update", "response", "algorithm"]


@struct.dataclass
class Sums:
    """A sum with its denominator: the numerator and the count of a mean not yet taken.

    Attributes:
        total: [] float32, the sum, rounded once.
        count: [] int32, how many terms it has; float32 where the terms are weighted, or may be more
            than 2^31.
        carry: [] float32, what `total` lost to rounding (at most half an ulp of it).
    """

    total: Array
    count: Array
    carry: Array | float = 0.0

    def mean(self) -> Array:
        """[] float32, the mean; 0 where there is no term."""
        return (self.total + self.carry) / self.denominator()

    def denominator(self) -> Array:
        """The count, or 1 where it is 0; weighted counts between 0 and 1 stay as they are."""
        return jnp.where(self.count > 0, self.count, 1)

    def __add__(self, other: "Sums") -> "Sums":
        """The sums of both parts together."""
        total, lost = _two_sum(self.total, other.total)
        total, carry = _two_sum(total, lost + (self.carry + other.carry))
        return Sums(total=total, count=self.count + other.count, carry=carry)


def merge(*parts: Mapping[str, Sums]) -> dict[str, Sums]:
    """Adds dictionaries of sums key by key: the metrics of microbatches become the batch's.

    Raises:
        ValueError: the parts do not have the same keys; the message lists those that differ.
    """
    for part in parts[1:]:
        if part.keys() != parts[0].keys():
            raise ValueError(f"parts have different keys: {sorted(part.keys() ^ parts[0].keys())}")
    return {key: reduce(Sums.__add__, (part[key] for part in parts)) for key in parts[0]}


def add_sums(*trees: PyTree) -> PyTree:
    """Adds trees of `Sums` that have one structure, leaf by leaf; on the device or on the host."""
    return jax.tree.map(
        lambda *sums: reduce(Sums.__add__, sums), *trees, is_leaf=lambda node: isinstance(node, Sums)
    )


def summed(stacked: Mapping[str, Sums]) -> dict[str, Sums]:
    """Adds sums that are stacked along a leading axis, e.g. those of the microbatches of a scan.

    Args:
        stacked: by key, Sums whose three words are [M].

    Returns:
        The same keys with [] words; equal to `merge` of the M parts to the last bit of `total`.
    """
    return {key: _summed(sums) for key, sums in stacked.items()}


def _summed(stacked: Sums) -> Sums:
    low = jnp.broadcast_to(jnp.asarray(stacked.carry, jnp.float32), stacked.total.shape)
    total, carry = _two_sum(*_tree_sum(stacked.total, low))
    return Sums(total=total, count=jnp.sum(stacked.count, dtype=stacked.count.dtype), carry=carry)


def masked_sum(values: Array, mask: Array) -> Sums:
    """Sums `values` where `mask`, over all axes.

    Args:
        values: [B, T] or [B], cast to float32; anything off the mask is ignored, NaN included.
        mask: bool, same shape.

    Returns:
        Sums of two [] words and an exact count. The gradient to `values` is 1 on the mask.

    Exact: equal, to the last bit of `total`, to the sum of the parts' sums for every split.
    """
    chex.assert_equal_shape([values, mask])
    chex.assert_type(mask, bool)
    kept = jnp.where(mask, values, 0.0).astype(jnp.float32)  # sums are float32 by name
    return _sums(kept, jnp.sum(mask, dtype=jnp.int32))


def masked_plain_sum(values: Array, mask: Array) -> Sums:
    """`masked_sum` for what is only reported: one float32 sum, its last digits in no fixed order.

    Args:
        values: [B, T] or [B], cast to float32; anything off the mask is ignored, NaN included.
        mask: bool, same shape.

    Exact: for booleans and small integers; else within n * 2^-24 of the sum of absolute values.
    """
    chex.assert_equal_shape([values, mask])
    chex.assert_type(mask, bool)
    total = jnp.sum(jnp.where(mask, values, 0).astype(jnp.float32))
    return Sums(total=total, count=jnp.sum(mask, dtype=jnp.int32), carry=jnp.zeros_like(total))


def masked_sequence_sum(values: Array, mask: Array, *, length: int | None = None) -> Sums:
    """Sums each row's mean over its own masked tokens; the count is the number of such rows.

    Args:
        values: [B, T], cast to float32.
        mask: [B, T] bool.
        length: divide every row by this constant and not by its own token count (Dr.GRPO).

    Returns:
        Sums over the rows that have at least one token; rows without one count nowhere.

    Raises:
        ValueError: `length` is not positive.
    """
    chex.assert_rank([values, mask], 2)
    chex.assert_equal_shape([values, mask])
    chex.assert_type(mask, bool)
    if length is not None and length < 1:
        raise ValueError(f"length is {length}, expected at least 1 token")
    tokens = jnp.sum(mask, axis=1, dtype=jnp.int32)  # [B]
    divisor = jnp.maximum(tokens, 1) if length is None else jnp.full_like(tokens, length)
    kept = jnp.where(mask, values, 0.0).astype(jnp.float32)
    return _sums(kept / divisor[:, None], jnp.sum(tokens > 0, dtype=jnp.int32))


@struct.dataclass
class Weighting:
    """Weights of a loss's tokens, and over what the weighted mean is taken.

    Attributes:
        weights: [B, T] float32, >= 0, without gradient; 1 where nothing is changed.
        reduction: static. "update": sum of w l over sum of w, over the whole update; "response":
            that quotient per row, then the mean over rows; "algorithm": the algorithm's own
            denominator, the numerator alone is weighted.
    """

    weights: Array
    reduction: Reduction = struct.field(pytree_node=False, default="update")


def weighted_sum(values: Array, mask: Array, weighting: Weighting) -> Sums:
    """`values` [B, T] reduced as `weighting` says, for the reductions "update" and "response".

    Returns:
        Sums whose count is the float32 sum of the weights ("update"), or the int32 number of rows that
        have a token ("response").

    Raises:
        ValueError: the reduction is "algorithm", which has no denominator of its own.
    """
    chex.assert_equal_shape([values, mask, weighting.weights])
    chex.assert_type(mask, bool)
    weights = jax.lax.stop_gradient(jnp.where(mask, weighting.weights, 0.0)).astype(jnp.float32)
    kept = weights * jnp.where(mask, values, 0.0).astype(jnp.float32)
    if weighting.reduction == "update":
        return _sums(kept, jnp.sum(weights))
    if weighting.reduction == "response":
        each = jnp.sum(weights, axis=1, keepdims=True)
        rows = jnp.sum(jnp.any(mask, axis=1), dtype=jnp.int32)
        return _sums(kept / jnp.where(each > 0, each, 1.0), rows)
    raise ValueError(f"reduction {weighting.reduction!r} has no denominator: expected 'update' or 'response'")


def row_means(values: Array, mask: Array) -> Array:
    """[B] float32, the mean of each row of `values` [B, T] over `mask` [B, T]; 0 for empty rows."""
    chex.assert_rank([values, mask], 2)
    chex.assert_equal_shape([values, mask])
    kept = jnp.where(mask, values, 0.0).astype(jnp.float32)
    return jnp.sum(kept, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def _sums(kept: Array, count: Array) -> Sums:
    """Two-word sum of a float32 array; its value is the exact sum's, its gradient a plain sum's."""
    total, carry = _two_word_sum(jax.lax.stop_gradient(kept))
    plain = jnp.sum(kept)
    return Sums(total=total + (plain - jax.lax.stop_gradient(plain)), count=count, carry=carry)


@jax.jit
def _two_word_sum(values: Array) -> tuple[Array, Array]:
    """(fl(sum), what its rounding lost) of a float32 array of any rank."""
    # Without the barrier the compiler may fuse the product that made `values` into the additions
    # (a fused multiply-add), and TwoSum would then measure the rounding of another number.
    high = jax.lax.optimization_barrier(values)
    low = jnp.zeros_like(high)
    for _ in range(values.ndim):
        high, low = _tree_sum(high, low)
    return _two_sum(high, low)


def _tree_sum(high: Array, low: Array) -> tuple[Array, Array]:
    """Sums two-word numbers [..., N] over the last axis by adding halves."""
    size = high.shape[-1]
    width = 1 << max(size - 1, 0).bit_length()
    pad = [(0, 0)] * (high.ndim - 1) + [(0, width - size)]
    high, low = jnp.pad(high, pad), jnp.pad(low, pad)
    while width > 1:
        width //= 2
        total, lost = _two_sum(high[..., :width], high[..., width:])
        high, low = total, lost + (low[..., :width] + low[..., width:])
    return high[..., 0], low[..., 0]


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth's TwoSum: (fl(a + b), the exact rounding error)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
