"""Decode attention on Hopper, Pallas Mosaic GPU: the stacked cache is read where it lies.

One CTA, a single warpgroup, takes one (row, KV head) and a share of its steps. A step is `STEP` columns of
the prompt or of the row's own keys and values, brought by TMA from the stacked array into a ring of slots:

    S^T [STEP, 8] = K q^T      wgmma; the keys are its left operand, eight query columns, G of them real
    P^T = exp2(S^T - max)      down the columns, in registers; running maximum and sum in float32
    O^T [C, 8] += V^T P^T      wgmma; V is transposed by its descriptor, P^T goes through shared memory

    step i:   wait slot i | S | softmax | P to shared memory, all warps meet | ask for step i + slots - 1 | O

The slot that is asked for was read in step i - 1, which every warp has left where they meet. Only steps
that a row sees are read: from the prompt's first real column on, and up to the row's length. Queries and
results have G rows in memory and 8 here: the copies fill up with zeros, and leave out what lies beyond.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Facts

Array = jax.Array

#: Columns of keys and values a step: the rows of one wgmma.
STEP = 64
#: Query columns of a CTA, the fewest that a wgmma takes.
QUERIES = 8
#: Slots of the ring, by head dimension: 64 and 96 KiB a CTA.
SLOTS = {64: 4, 128: 3}
#: CTAs that keep the machine busy: two on each of 132 multiprocessors.
BUSY = 264

_TILED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
_LOWEST = -1e30
_FLOAT32, _BFLOAT16 = jnp.float32, jnp.bfloat16


def refuses(facts: Facts) -> str | None:
    """Hopper, bfloat16, head dimensions 64 and 128, whole steps in both segments, free order."""
    if facts.platform != "gpu" or facts.capability != (9, 0):
        return f"needs compute capability 9.0, got {facts.platform} {facts.capability}"
    if facts.order != "free":
        return f"sums in free order, but order is {facts.order!r}"
    if facts.x_dtype != "bfloat16" or facts.w_dtype != "bfloat16":
        return f"needs bfloat16 queries and cache, got {facts.x_dtype} and {facts.w_dtype}"
    if facts.k not in SLOTS:
        return f"needs a head dimension of 64 or 128, got {facts.k}"
    if not 1 <= facts.n <= QUERIES:
        return f"needs 1 to {QUERIES} query heads a KV head, got {facts.n}"
    if len(facts.columns) != 2 or any(width % STEP or not width for width in facts.columns):
        return f"needs two segments of a multiple of {STEP} columns, got {facts.columns}"
    return None


def num_splits(units: int, steps: int) -> int:
    """CTAs that share the steps of one (row, KV head), a power of two; 1 where `units` fill the machine."""
    splits = 1
    while units * splits * 2 <= BUSY and splits * 2 <= steps:
        splits *= 2
    return splits


def decode_attention(
    q: Array,
    cache: tuple[Array, Array],
    prompt: tuple[Array, Array],
    *,
    layer: Array,
    lengths: Array,
    starts: Array,
    scale: float,
    splits: int | None = None,
    interpret: Any = None,
) -> Array:
    """`reference.decode_attention` with probabilities rounded to bfloat16, sums in float32.

    Args:
        splits: CTAs for each (row, KV head); None chooses.
        interpret: `plgpu.InterpretGPUParams` runs the kernel on a CPU.
    """
    (b, h, c), heads = q.shape, cache[0].shape[2]
    g = h // heads
    if splits is None:
        splits = num_splits(b * heads, (cache[0].shape[3] + prompt[0].shape[3]) // STEP)
    columns = q.reshape(b * heads, g, c)
    stacks = (x.reshape(-1, *x.shape[3:]) for x in (*prompt, *cache))  # [L * P * K, T, C], [L * B * K, S, C]
    call = _kernel(heads=heads, scale=scale, splits=splits, c=c, rows=b, prompts=starts.shape[0])
    shapes = [jax.ShapeDtypeStruct((b * heads, g, c), _BFLOAT16)]
    if splits > 1:
        parts = [(c, QUERIES), (QUERIES,), (QUERIES,)]
        shapes = [jax.ShapeDtypeStruct((b * heads, splits, *part), _FLOAT32) for part in parts]
    out = plgpu.kernel(
        call,
        out_type=shapes,
        grid=(b * heads, splits),
        grid_names=("unit", "split"),
        interpret=interpret,
        scratch_types=[
            plgpu.SMEM((QUERIES, c), _BFLOAT16, transforms=_TILED),
            plgpu.SMEM((QUERIES, STEP), _BFLOAT16, transforms=_TILED),
            plgpu.SMEM((SLOTS[c], STEP, c), _BFLOAT16, transforms=_TILED),
            plgpu.SMEM((SLOTS[c], STEP, c), _BFLOAT16, transforms=_TILED),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS[c]),
        ],
    )(columns, *stacks, layer.reshape(1), starts, lengths)
    joined = out[0] if splits == 1 else _merge(*out).astype(q.dtype)
    return joined[:, :g].reshape(b, h, c)


def _merge(out: Array, top: Array, total: Array) -> Array:
    """Parts [U, splits, C, 8] with their maxima and sums [U, splits, 8] under one softmax: [U, 8, C]."""
    share = jnp.exp2(top - top.max(axis=1, keepdims=True))
    total = (total * share).sum(axis=1)[:, None]
    mixed = (out * share[:, :, None]).sum(axis=1) / jnp.where(total > 0, total, 1.0)
    return jnp.swapaxes(mixed, 1, 2)


def _kernel(*, heads: int, scale: float, splits: int, c: int, rows: int, prompts: int) -> Any:
    """The body for these sizes; `where` below says which columns a step is."""
    slots, factor = SLOTS[c], float(scale * math.log2(math.e))

    def kernel(q_ref, pk_ref, pv_ref, k_ref, v_ref, layer_ref, starts_ref, lengths_ref, *rest):
        outs, (q_s, p_s, k_s, v_s, q_ready, ready) = rest[:-6], rest[-6:]
        unit, split = lax.axis_index("unit"), lax.axis_index("split")
        row, head = lax.div(unit, heads), lax.rem(unit, heads)
        group = lax.div(row, rows // prompts)
        layer, start, length = layer_ref[0], starts_ref[group], lengths_ref[row]
        width = pk_ref.shape[1]
        skipped = lax.div(start, STEP)
        before = width // STEP - skipped
        steps = before + lax.div(length + (STEP - 1), STEP)
        begin, end = lax.div(steps * split, splits), lax.div(steps * (split + 1), splits)

        def fetch(step):
            slot = lax.rem(step, slots)

            def copy(keys, values, entry, first):
                at = (entry, pl.ds(first, STEP))
                plgpu.copy_gmem_to_smem(keys.at[at], k_s.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(values.at[at], v_s.at[slot], ready.at[slot])

            @pl.when(step < before)
            def _():
                copy(pk_ref, pv_ref, (layer * prompts + group) * heads + head, (skipped + step) * STEP)

            @pl.when(step >= before)
            def _():
                copy(k_ref, v_ref, (layer * rows + row) * heads + head, (step - before) * STEP)

        def body(step, carry):
            top, total, out = carry
            slot = lax.rem(step, slots)
            plgpu.barrier_wait(ready.at[slot])
            s = _product(k_s.at[slot], q_s.transpose((1, 0))) * factor
            mine = step >= before
            first = jnp.where(mine, step - before, skipped + step) * STEP
            low, high = jnp.where(mine, 0, start), jnp.where(mine, length, width)
            at = first + plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
            s = jnp.where((at >= low) & (at < high), s, -jnp.inf)
            highest = jnp.maximum(top, s.max(axis=0))
            shrink = jnp.exp2(top - highest)
            p = jnp.exp2(s - _down(highest, s.shape))
            p_s.transpose((1, 0))[...] = plgpu.layout_cast(p.astype(_BFLOAT16), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            pl.when(step + (slots - 1) < end)(lambda: fetch(step + (slots - 1)))
            mixed = _product(v_s.at[slot].transpose((1, 0)), p_s.transpose((1, 0)))
            return highest, total * shrink + p.sum(axis=0), out * _down(shrink, out.shape) + mixed

        plgpu.copy_gmem_to_smem(q_ref.at[unit, pl.ds(0, QUERIES)], q_s, q_ready)
        for ahead in range(slots - 1):
            pl.when(begin + ahead < end)(functools.partial(fetch, begin + ahead))
        plgpu.barrier_wait(q_ready)
        top, total, out = lax.fori_loop(begin, end, body, _nothing(c))
        if splits > 1:
            for ref, part in zip(outs, (out, top, total), strict=True):
                ref[unit, split] = part
            return
        out = out * _down(jnp.where(total > 0, 1.0 / total, 0.0), out.shape)
        q_s.transpose((1, 0))[...] = plgpu.layout_cast(out.astype(_BFLOAT16), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s, outs[0].at[unit, pl.ds(0, QUERIES)])
        plgpu.wait_smem_to_gmem(0)

    return kernel


def _product(a: Any, b: Any) -> Array:
    """a [M, K] b [K, 8] in float32, both in shared memory."""

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    sums = plgpu.ACC((a.shape[0], b.shape[1]), _FLOAT32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(multiply, sums)


def _down(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, (1,))


def _nothing(c: int) -> tuple[Array, Array, Array]:
    """Maximum, sum and result before the first step."""
    column = plgpu.Layout.WGMMA.reduce(0)
    return (
        plgpu.layout_cast(jnp.full((QUERIES,), _LOWEST, _FLOAT32), column),
        plgpu.layout_cast(jnp.zeros((QUERIES,), _FLOAT32), column),
        plgpu.layout_cast(jnp.zeros((c, QUERIES), _FLOAT32), plgpu.Layout.WGMMA),
    )
