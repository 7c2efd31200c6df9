"""How tokens form sequences: key/value caches, masks, and the three shapes of attention.

Decode and scoring attend to the same two key segments of the same widths: the prompt's (shared by
its group, never copied) and the completion's own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array
from fp4rl_jax.models.kv import KV, Cached, decoded, write
from fp4rl_jax.ops import machine
from fp4rl_jax.ops.segments import Span
from fp4rl_jax.ops.spec import Side


def positions_of(token_mask: Array) -> Array:
    """Positions that count real tokens only: [..., T] bool -> [..., T] int32; padding gets 0."""
    return jnp.maximum(jnp.cumsum(token_mask.astype(jnp.int32), axis=-1) - 1, 0)


def causal(queries: int, keys: int, first: Array | int = 0) -> Array:
    """[queries, keys] bool: query i, standing in column first + i, sees the columns up to its own."""
    return jnp.arange(keys)[None, :] <= first + jnp.arange(queries)[:, None]


def over_rows(prefix_mask: Array, num_rows: int, width: int) -> Array:
    """A prompt's key mask for every query of its group: [P, S] -> [B, width, S]."""
    repeated = jnp.repeat(prefix_mask, num_rows // prefix_mask.shape[0], axis=0)
    return jnp.broadcast_to(repeated[:, None, :], (num_rows, width, prefix_mask.shape[1]))


@dataclasses.dataclass(frozen=True)
class BlockAttention:
    """A block attends to an optional prefix and, causally, to itself; its KV is kept."""

    prefix_mask: Array | None  # [B, T, S] bool
    own_mask: Array  # [B, T, T] bool
    scale: float
    side: Side

    def __call__(self, q: Array, cached: Cached, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        own = ops.Segment(*cached.by_head(), self.own_mask)
        if self.prefix_mask is None:
            out = _attention(q, (own,), self.scale, self.side, span="causal")
        else:
            segments = (_segment(extra, self.prefix_mask, q.dtype), own)
            out = _after_prompt(q, segments, self.scale, self.side)
        return out, cached.stored(), state


@dataclasses.dataclass(frozen=True)
class CacheAttention:
    """New tokens are written into the cache at `column` and attend to the prefix and the cache."""

    prefix_mask: Array | None  # [B, T, S] bool
    cache_mask: Array  # [B, T, cache width] bool
    column: Array  # [] int32
    scale: float
    side: Side

    def __call__(self, q: Array, cached: Cached, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        prefix, index = extra
        state = write(state, cached.stored(), layer=index, column=self.column)
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), state)
        segments = (_segment(own, self.cache_mask, q.dtype),)
        if self.prefix_mask is not None:
            segments = (_segment(prefix, self.prefix_mask, q.dtype), *segments)
        out = _attention(q, segments, self.scale, self.side)
        return out, None, state


@dataclasses.dataclass(frozen=True)
class StackedAttention:
    """One new token a row is written into the cache at `column`; prefix and cache are read where they lie."""

    prefix: KV
    starts: Array  # [P] int32, first real column of each prompt
    column: Array  # [] int32
    lengths: Array  # [B] int32, columns seen
    scale: float
    side: Side

    def __call__(self, q: Array, cached: Cached, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        state = write(state, cached.stored(), layer=extra, column=self.column)
        out = ops.attention_decode(
            q,
            _arrays(state),
            _arrays(self.prefix),
            layer=extra,
            lengths=self.lengths,
            starts=self.starts,
            scale=self.scale,
            side=self.side,
        )
        return out, None, state


@dataclasses.dataclass(frozen=True)
class GroupAttention:
    """Tokens [P, Tp + G * T]: a prompt, then its G completions one after the other.

    The prompt attends to itself; each completion to the prompt and to itself.
    """

    prompt_mask: Array  # [P, Tp, Tp] bool
    prefix_mask: Array  # [B, T, Tp] bool
    own_mask: Array  # [B, T, T] bool
    scale: float
    side: Side

    def __call__(self, q: Array, cached: Cached, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        width = self.prompt_mask.shape[1]
        rows, block = self.own_mask.shape[:2]
        (qp, qc), *keys_values = (_part(x, width, rows, block) for x in (q, *cached.by_token()))
        (kp, kc), (vp, vc) = (tuple(map(ops.by_head, parts)) for parts in keys_values)
        own = ops.Segment(kp, vp, self.prompt_mask)
        prompt = _attention(qp, (own,), self.scale, self.side, span="causal")
        if block == 0:
            return prompt, None, state
        segments = (ops.Segment(kp, vp, self.prefix_mask), ops.Segment(kc, vc, self.own_mask))
        out = _after_prompt(qc, segments, self.scale, self.side)
        out = out.reshape(prompt.shape[0], -1, *out.shape[2:])
        return jnp.concatenate([prompt, out], axis=1), None, state


def _arrays(cached: KV) -> tuple[Array, Array]:
    assert isinstance(cached.k, jax.Array) and isinstance(cached.v, jax.Array)  # not quantized
    return cached.k, cached.v


def _segment(cached: KV, mask: Array, dtype: jnp.dtype) -> ops.Segment:
    return ops.Segment(decoded(cached.k, dtype), decoded(cached.v, dtype), mask)


def _attention(
    q: Array, segments: tuple[ops.Segment, ...], scale: float, side: Side, span: Span = "any"
) -> Array:
    """`ops.attention` as the side has it."""
    return ops.attention(
        q, segments=segments, scale=scale, order=side.order, span=span, fused=side.fused_attention
    )


def _after_prompt(q: Array, segments: tuple[ops.Segment, ...], scale: float, side: Side) -> Array:
    """Attention of completion tokens, [B, T, H, C], over segments with masks [B, T, S].

    On a CPU one query column at a time: the dots then have the shapes of the sampler's, whose bits
    they share (a batched dot of 3 rows and one of 33 differ in the last place), and they are too
    small to gain from being joined.
    """

    if machine.current().platform != "cpu" or q.shape[1] == 1:
        return _attention(q, segments, scale, side, span="causal")

    def attend(q: Array, *masks: Array) -> Array:
        seen = tuple(s._replace(mask=mask) for s, mask in zip(segments, masks, strict=True))
        return _attention(q, seen, scale, side)

    masks = [segment.mask for segment in segments]
    columns = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in (q, *masks)]
    out = jax.lax.map(lambda column: attend(*column), tuple(columns))  # [T, B, 1, H, C]
    return jnp.moveaxis(out[:, :, 0], 0, 1)


def _part(x: Array, width: int, rows: int, block: int) -> tuple[Array, Array]:
    """[P, Tp + G * T, ...] -> prompts [P, Tp, ...] and completions [B, T, ...]."""
    return x[:, :width], x[:, width:].reshape(rows, block, *x.shape[2:])
