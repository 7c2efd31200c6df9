"""Attention over key/value segments that share one softmax.

The completion's own cache has batch B; a prompt's has batch P and is read by its B / P rows
without a copy. Scores, softmax and accumulation are float32; the probabilities are rounded to
the values' dtype before their product, on both sides alike.
"""

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops import attention_cudnn
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.attention_fixed import attention_fixed
from fp4rl_jax.ops.operands import BFLOAT16, FLOAT32
from fp4rl_jax.ops.rounding import round_to, settle
from fp4rl_jax.ops.segments import Segment, Span, by_head
from fp4rl_jax.ops.spec import Fused, Order


def attention(
    q: Array,
    k: Array | None = None,
    v: Array | None = None,
    mask: Array | None = None,
    *,
    segments: tuple[Segment, ...] = (),
    scale: float,
    order: Order = "free",
    span: Span = "any",
    fused: Fused = "auto",
) -> Array:
    """Softmax attention with grouped queries.

    Args:
        q: [B, T, H, C] bfloat16 or float32.
        k, v: [B, S, K, C] with H a multiple of K; or None where `segments` says it all.
        mask: [B, T, S] bool, True where a query sees a key.
        segments: further keys and values under the same softmax.
        scale: multiplies the scores.
        order: "fixed" makes a query's result independent of the other queries (CPU).
        span: "causal" says that the masks show no query a later column; they still say all that is seen.
        fused: "auto" takes cuDNN's kernel where it fits; "never" the compiler's dots.

    Returns:
        [B, T, H, C] in q's dtype; zeros where a query sees no key.

    Raises:
        ValueError: a segment's shapes do not fit the queries.
    """
    if k is not None and v is not None and mask is not None:
        segments = (Segment(by_head(k), by_head(v), mask), *segments)
    for segment in segments:
        _check(q, segment)
    if order == "fixed":
        return attention_fixed(q, segments, scale)
    if fused == "auto" and attention_cudnn.refusal(q, segments, machines.current()) is None:
        return attention_cudnn.attention_cudnn(q, segments, scale, span)
    scores = [_scores(q, segment, scale) for segment in segments]  # each [B, K, G, T, S]
    highest = jnp.max(jnp.stack([s.max(axis=-1) for s in scores]), axis=0)
    highest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights = [jnp.exp(s - highest[..., None]) for s in scores]
    total = sum(w.sum(axis=-1) for w in weights)  # [B, K, G, T]
    out = sum(_mix(w, segment, q.dtype) for w, segment in zip(weights, segments, strict=True))
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    b, t, h, c = q.shape
    return settle(jnp.moveaxis(out, 3, 1).reshape(b, t, h, c), q.dtype)


def _check(q: Array, segment: Segment) -> None:
    b, t, h, c = q.shape
    p, heads, s, width = segment.k.shape
    fits = segment.v.shape == segment.k.shape and segment.mask.shape == (b, t, s)
    if not fits or b % p or h % heads or width != c:
        raise ValueError(
            f"segment k {segment.k.shape}, v {segment.v.shape}, mask {segment.mask.shape} "
            f"does not fit q {q.shape}"
        )


def _dot_dtype(*arrays: Array) -> jnp.dtype:
    narrow = all(a.dtype == BFLOAT16 for a in arrays)
    return jnp.dtype(machines.current().narrow) if narrow else FLOAT32


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == FLOAT32 else None


def _scores(q: Array, segment: Segment, scale: float) -> Array:
    """[B, K, G, T, S] float32, -inf where masked."""
    b, t, h, c = q.shape
    p, heads, _, _ = segment.k.shape
    dtype = _dot_dtype(q, segment.k)
    grouped = q.reshape(p, b // p, t, heads, h // heads, c).astype(dtype)
    scores = jnp.einsum(
        "pntkgc,pksc->pkngts",
        grouped,
        segment.k.astype(dtype),
        precision=_precision(dtype),
        preferred_element_type=jnp.float32,
    )  # [P, K, B/P, G, T, S]
    scores = jnp.moveaxis(scores, 1, 2).reshape(b, heads, h // heads, t, -1) * scale
    return jnp.where(segment.mask[:, None, None], scores, -jnp.inf)


def _mix(weights: Array, segment: Segment, dtype: jnp.dtype) -> Array:
    """Sums the values under unnormalised probabilities: [B, K, G, T, C] float32."""
    b, heads, g, t, s = weights.shape
    p = segment.v.shape[0]
    weights = round_to(weights, dtype).reshape(p, b // p, heads, g, t, s)
    dot_dtype = _dot_dtype(segment.v) if dtype == BFLOAT16 else FLOAT32
    v, product = segment.v.astype(dot_dtype), "pnkgts,pksc->pnkgtc"
    if dot_dtype == BFLOAT16 and machines.current().platform == "cpu":
        # XLA on a CPU has bfloat16 dots over the last axes alone, and would undo a plain transpose
        v, product = jax.lax.optimization_barrier(jnp.swapaxes(v, -1, -2)), "pnkgts,pkcs->pnkgtc"
    out = jnp.einsum(
        product,
        weights.astype(dot_dtype),
        v,
        precision=_precision(dot_dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, heads, g, t, -1)
