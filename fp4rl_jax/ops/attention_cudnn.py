"""Attention of whole blocks by cuDNN's fused kernel: no score matrix in memory, forward or backward.

For prefill, scoring and training on an NVIDIA GPU. Segments are joined along their keys, a prompt's
repeated for its rows, and what a query does not see is a bias of -inf's stand-in.
"""

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.operands import BFLOAT16
from fp4rl_jax.ops.segments import Segment, Span, by_head

#: Fewer queries a row than this are a decode step's, whose cost is reading the cache where it lies.
LEAST_QUERIES = 16


def refusal(q: Array, segments: tuple[Segment, ...], machine: Machine) -> str | None:
    """Why cuDNN does not take these arguments, from static facts; None where it does."""
    if machine.platform != "gpu" or machine.capability is None or machine.capability < (8, 0):
        return f"needs an NVIDIA GPU of capability 8.0 or more, here is {machine.device_kind}"
    if any(x.dtype != BFLOAT16 for s in segments for x in (q, s.k, s.v)):
        return "takes bfloat16 queries, keys and values only"
    if q.shape[1] < LEAST_QUERIES:
        return f"{q.shape[1]} queries a row are fewer than {LEAST_QUERIES}"
    if q.shape[-1] % 8 or q.shape[-1] > 128:
        return f"head_dim {q.shape[-1]} is not a multiple of 8 up to 128"
    return None


def attention_cudnn(q: Array, segments: tuple[Segment, ...], scale: float, span: Span = "any") -> Array:
    """`attention` in one fused kernel; q [B, T, H, C] bfloat16 -> [B, T, H, C] bfloat16.

    A causal call skips the keys after each query's column. The kernel takes query i to stand in column i, so
    queries of zeros stand in the columns before the first.

    Exact zeros where a query sees no key, as everywhere.
    """
    rows, queries = q.shape[:2]
    k, v = (
        jnp.concatenate([_for_rows(getattr(s, name), rows) for s in segments], axis=1) for name in ("k", "v")
    )
    mask = jnp.concatenate([s.mask for s in segments], axis=-1)
    front = k.shape[1] - queries if span == "causal" else 0
    if front < 0:
        raise ValueError(f"{queries} causal queries have only {k.shape[1]} columns of keys")
    # its backward with a bias takes even lengths only
    ends = front, (front + queries) % 2, k.shape[1] % 2
    q = jnp.pad(q, ((0, 0), ends[:2], (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, ends[2]), (0, 0), (0, 0))) for x in (k, v))
    seen = jnp.pad(mask, ((0, 0), ends[:2], (0, ends[2])))
    out = jax.nn.dot_product_attention(
        q, k, v, mask=seen[:, None], scale=scale, is_causal=span == "causal", implementation="cudnn"
    )
    out = out[:, front : front + queries]
    return jnp.where(jnp.any(mask, axis=-1)[..., None, None], out, jnp.zeros((), q.dtype))


def _for_rows(x: Array, rows: int) -> Array:
    """A segment's keys or values [P, K, S, C], one entry a row of queries and time first: [B, S, K, C]."""
    return by_head(jnp.repeat(x, rows // x.shape[0], axis=0))
