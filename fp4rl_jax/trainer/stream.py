"""Microbatches one after the other; guidance that waits in host memory comes to the device one ahead.

TRACE's cache (arXiv 2610.07767) leaves the device after the rollout and is reloaded slice by slice. Here the
slice of microbatch i + 1 is asked for before microbatch i is computed and used after it, so that a compiler
with asynchronous copies hides the transfer: two slices are on the device at a time, whatever the batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.parallel import BATCH, Layout, put_rows
from fp4rl_jax.parallel.memory import fetched, put_in_host
from fp4rl_jax.trainer.config import TrainerConfig


def place[Batch: (TrainBatch, Rollouts)](
    batch: Batch, config: TrainerConfig, layout: Layout | None
) -> tuple[Batch, PyTree]:
    """A host batch where an update of it reads it.

    Args:
        batch: of numpy arrays, [B, ...].
        config: says where guidance waits.
        layout: of the run, or None.

    Returns:
        The batch, its rows shared out on a mesh, and None; or, where guidance waits in host memory, the batch
        without it, and the guidance there, leaves [M, rows, ...] of M microbatches.
    """
    if config.guidance_memory == "device" or not batch.guidance:
        return put_rows(batch, layout), None
    held = jax.tree.map(lambda leaf: _stacked(leaf, config), batch.guidance)
    rest = dataclasses.replace(batch, guidance=None)
    return put_rows(rest, layout), put_in_host(held, (None, *BATCH), layout)


def _stacked(leaf: Any, config: TrainerConfig) -> Any:
    rows = config.microbatch_rows or leaf.shape[0]
    return leaf.reshape(leaf.shape[0] // rows, rows, *leaf.shape[1:])


def over_microbatches(
    fn: Callable[[Any, TrainBatch, Any], tuple[Any, Any]],
    carry: Any,
    shares: TrainBatch,
    held: PyTree,
    extra: Any = None,
    *,
    layout: Layout | None,
) -> tuple[Any, Any]:
    """`lax.scan` of `fn(carry, share, extra) -> (carry, out)` over stacked microbatches.

    Args:
        shares: leaves [M, rows, ...]. held: their guidance in host memory, as `place` leaves it, or None.
        extra: leaves [M, ...], or None.

    Returns:
        The last carry and the stacked outs.
    """
    if held is None:
        return jax.lax.scan(lambda carry, each: fn(carry, *each), carry, (shares, extra))
    count = shares.tokens.shape[0]

    def fetch(index: Array | int) -> PyTree:
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), held)
        return fetched(own, BATCH, layout)

    def step(carried: tuple[Any, PyTree], each: tuple[Array, TrainBatch, Any]) -> tuple[Any, Any]:
        (inner, ready), (index, share, own) = carried, each
        ahead = fetch(jnp.minimum(index + 1, count - 1))
        inner, out = fn(inner, dataclasses.replace(share, guidance=ready), own)
        return (inner, ahead), out

    (carry, _), outs = jax.lax.scan(step, (carry, fetch(0)), (jnp.arange(count), shares, extra))
    return carry, outs


def device_bytes(guidance: PyTree, config: TrainerConfig, layout: Layout | None) -> int:
    """Bytes of guidance [B, ...] that lie on a device while an update runs.

    One update's share of the rows, or two of its microbatches where the rest waits in host memory; of these
    the device's own part.
    """

    def one(leaf: Any) -> int:
        rows = leaf.shape[0] // config.updates_per_rollout
        if config.guidance_memory == "host":
            rows = min(rows, 2 * (config.microbatch_rows or rows))
        shape = (rows, *leaf.shape[1:])
        own = shape if layout is None else layout.sharding(BATCH, shape).shard_shape(shape)
        return math.prod(own) * leaf.dtype.itemsize

    return sum(map(one, jax.tree.leaves(guidance)))
