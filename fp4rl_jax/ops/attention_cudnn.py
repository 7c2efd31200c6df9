"""Attention of whole blocks by cuDNN's fused kernel: no score matrix in memory, forward or backward.

For prefill, scoring and training on an NVIDIA GPU. Segments are joined along their keys, a prompt's
repeated for its rows, and what a query does not see is a bias of -inf's stand-in.
"""

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.operands import BFLOAT16
from fp4rl_jax.ops.segments import Segment, by_head

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


def attention_cudnn(q: Array, segments: tuple[Segment, ...], scale: float) -> Array:
    """`attention` in one fused kernel; q [B, T, H, C] bfloat16 -> [B, T, H, C] bfloat16.

    Exact zeros where a query sees no key, as everywhere.
    """
    rows, queries = q.shape[:2]
    k, v = (
        jnp.concatenate([_for_rows(getattr(s, name), rows) for s in segments], axis=1) for name in ("k", "v")
    )
    mask = jnp.concatenate([s.mask for s in segments], axis=-1)
    # its backward with a bias takes even lengths only
    q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    seen = jnp.pad(mask, ((0, 0), (0, q.shape[1] - queries), (0, k.shape[1] - mask.shape[2])))
    out = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scale, implementation="cudnn")
    return jnp.where(jnp.any(mask, axis=-1)[..., None, None], out[:, :queries], jnp.zeros((), q.dtype))


def _for_rows(x: Array, rows: int) -> Array:
    """A segment's keys or values [P, K, S, C], one entry a row of queries and time first: [B, S, K, C]."""
    return by_head(jnp.repeat(x, rows // x.shape[0], axis=0))
