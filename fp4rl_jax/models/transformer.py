"""Tokens to hidden states: the layer scan, and the three ways in which tokens form sequences.

- `forward` over whole sequences (prefill), or over a block that follows a shared prefix;
- `forward` with a `cache`: one new token per row, written into the cache (decode);
- `forward_groups`: prompts and their completions in one pass, every weight used once (scoring
  and training).

All three run `blocks.layer`. Decode and scoring attend to the same two key segments of the same
widths: the prompt's (shared by its group, never copied) and the completion's own.
"""

import dataclasses
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.models import rope
from fp4rl_jax.models.blocks import Attend, SiteCalls, Stats, Tokens, layer
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.params import num_stacked
from fp4rl_jax.ops.spec import Side

Remat = Literal["none", "layer"]


@struct.dataclass
class KV:
    """Keys (after RoPE) and values of cached tokens, [L, B, S, K, C] in the activation dtype."""

    k: Array
    v: Array


@struct.dataclass
class Forward:
    """What `forward` returns.

    Attributes:
        hidden: [B, T, D] in the activation dtype, after the final norm.
        kv: the block's own keys and values [L, B, T, K, C]; with a cache, the updated cache.
        stats: {site: {"act" | "weight": sums over layers}}; empty unless asked for.
    """

    hidden: Array
    kv: KV
    stats: PyTree


@struct.dataclass
class GroupForward:
    """What `forward_groups` returns.

    Attributes:
        prompt_hidden: [P, D], after the final norm, of each prompt's last column.
        hidden: [B, T, D], after the final norm, of the completion columns.
        stats: as in `Forward`.
    """

    prompt_hidden: Array
    hidden: Array
    stats: PyTree


def positions_of(token_mask: Array) -> Array:
    """Positions that count real tokens only: [..., T] bool -> [..., T] int32; padding gets 0."""
    return jnp.maximum(jnp.cumsum(token_mask.astype(jnp.int32), axis=-1) - 1, 0)


def cache_width(completion_width: int) -> int:
    """Columns of a completion's KV segment: its last token is never fed back."""
    return max(completion_width - 1, 1)


def new_cache(config: ModelConfig, *, num_rows: int, completion_width: int, dtype: str) -> KV:
    """An empty completion cache [L, B, cache_width, K, C]."""
    width = cache_width(completion_width)
    shape = (config.num_layers, num_rows, width, config.num_kv_heads, config.head_dim)
    return KV(k=jnp.zeros(shape, dtype_of(dtype)), v=jnp.zeros(shape, dtype_of(dtype)))


@dataclasses.dataclass(frozen=True)
class _BlockAttention:
    """A block attends to an optional prefix and, causally, to itself; its KV is kept."""

    prefix_mask: Array | None  # [B, T, S] bool
    own_mask: Array  # [B, T, T] bool
    scale: float
    order: Any

    def __call__(self, q: Array, k: Array, v: Array, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        segments = (ops.Segment(k, v, self.own_mask),)
        if self.prefix_mask is not None:
            segments = (ops.Segment(extra.k, extra.v, self.prefix_mask), *segments)
        out = ops.attention(q, segments=segments, scale=self.scale, order=self.order)
        return out, KV(k=k, v=v), state


@dataclasses.dataclass(frozen=True)
class _CacheAttention:
    """New tokens are written into the cache at `column` and attend to the prefix and the cache."""

    prefix_mask: Array | None  # [B, T, S] bool
    cache_mask: Array  # [B, T, cache width] bool
    column: Array  # [] int32
    scale: float
    order: Any

    def __call__(self, q: Array, k: Array, v: Array, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        prefix, index = extra
        start = (index, 0, self.column, 0, 0)
        state = KV(
            k=jax.lax.dynamic_update_slice(state.k, k[None].astype(state.k.dtype), start),
            v=jax.lax.dynamic_update_slice(state.v, v[None].astype(state.v.dtype), start),
        )
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), state)
        segments = (ops.Segment(own.k, own.v, self.cache_mask),)
        if self.prefix_mask is not None:
            segments = (ops.Segment(prefix.k, prefix.v, self.prefix_mask), *segments)
        out = ops.attention(q, segments=segments, scale=self.scale, order=self.order)
        return out, None, state


@dataclasses.dataclass(frozen=True)
class _GroupAttention:
    """Tokens [P, Tp + G * T]: a prompt, then its G completions one after the other.

    The prompt attends to itself; each completion to the prompt and to itself.
    """

    prompt_mask: Array  # [P, Tp, Tp] bool
    prefix_mask: Array  # [B, T, Tp] bool
    own_mask: Array  # [B, T, T] bool
    scale: float
    order: Any

    def __call__(self, q: Array, k: Array, v: Array, *, extra: Any, state: Any) -> tuple[Array, Any, Any]:
        width = self.prompt_mask.shape[1]
        rows, block = self.own_mask.shape[:2]
        (qp, qc), (kp, kc), (vp, vc) = (_part(x, width, rows, block) for x in (q, k, v))
        prompt = ops.attention(
            qp, segments=(ops.Segment(kp, vp, self.prompt_mask),), scale=self.scale, order=self.order
        )
        segments = (ops.Segment(kp, vp, self.prefix_mask), ops.Segment(kc, vc, self.own_mask))
        out = ops.attention(qc, segments=segments, scale=self.scale, order=self.order)
        out = out.reshape(prompt.shape[0], -1, *out.shape[2:])
        return jnp.concatenate([prompt, out], axis=1), None, state


def _part(x: Array, width: int, rows: int, block: int) -> tuple[Array, Array]:
    """[P, Tp + G * T, ...] -> prompts [P, Tp, ...] and completions [B, T, ...]."""
    return x[:, :width], x[:, width:].reshape(rows, block, *x.shape[2:])


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive layers that one scan runs: `count` of a stack, from its layer `offset`."""

    stack: PyTree
    offset: int
    first: int
    count: int
    frozen: bool

    @property
    def whole(self) -> bool:
        return self.count == num_stacked(self.stack)


def _pieces(layers: PyTree, trainable_from: int) -> list[_Piece]:
    """Cuts the stack(s) of layers where training starts."""
    stacks = layers if isinstance(layers, tuple) else (layers,)
    total = sum(num_stacked(stack) for stack in stacks)
    if not 0 <= trainable_from <= total:
        raise ValueError(f"trainable_from must be in 0..{total} layers, got {trainable_from}")
    pieces, first = [], 0
    for stack in stacks:
        count = num_stacked(stack)
        below = min(max(trainable_from - first, 0), count)
        if below:
            pieces.append(_Piece(stack, 0, first, below, True))
        if count - below:
            pieces.append(_Piece(stack, below, first + below, count - below, False))
        first += count
    return pieces


@dataclasses.dataclass(frozen=True)
class _Run:
    """What all layers of a call share."""

    attend: Attend
    tokens: Tokens
    config: ModelConfig
    side: Side
    stats: Stats
    remat: Remat

    def body(self, carry: Any, weights: PyTree, scanned: Any) -> tuple[Any, Any]:
        """One layer as a scan body: carry (x, state) -> (carry, (kept, stats))."""
        x, state = carry
        extra, key, hint = scanned
        calls = SiteCalls(self.side, key=key, hint=hint, stats=self.stats)
        x, kept, state = layer(
            x,
            weights,
            calls,
            attend=self.attend,
            tokens=self.tokens,
            config=self.config,
            extra=extra,
            state=state,
        )
        return (x, state), (kept, calls.found)

    def frozen(self, carry: Any, piece: _Piece, scanned: Any) -> tuple[Any, Any]:
        """Runs layers without gradient: nothing is saved, and the weights are read in place."""
        carry, stack, scanned = jax.lax.stop_gradient((carry, piece.stack, scanned))

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            index, scanned = xs
            weights = jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack
            )
            return self.body(carry, weights, scanned)

        return jax.lax.scan(body, carry, (piece.offset + jnp.arange(piece.count), scanned))

    def trained(self, carry: Any, piece: _Piece, scanned: Any) -> tuple[Any, Any]:
        """Runs layers that may be differentiated, recomputing each in the backward if asked."""
        stack = piece.stack
        if not piece.whole:
            stack = jax.tree.map(lambda leaf: leaf[piece.offset : piece.offset + piece.count], stack)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            return self.body(carry, *xs)

        if self.remat == "layer":
            body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(body, carry, (stack, scanned))


def _run_layers(
    x: Array,
    layers: PyTree,
    run: _Run,
    *,
    state: PyTree,
    extra: PyTree,
    key: Array | None,
    hint: PyTree,
    trainable_from: int,
) -> tuple[Array, PyTree, PyTree, PyTree]:
    """Runs all layers; returns (x, state, kept stacked over L, stats summed over L)."""
    keys = None if key is None else jax.random.split(key, run.config.num_layers)
    everything = (extra, keys, hint or {})
    carry, kept, stats = (x, state), [], []
    for piece in _pieces(layers, trainable_from):
        last = piece.first + piece.count
        scanned = jax.tree.map(lambda leaf, a=piece.first, b=last: leaf[a:b], everything)
        step = run.frozen if piece.frozen else run.trained
        carry, (kept_here, stats_here) = step(carry, piece, scanned)
        kept.append(kept_here)
        stats.append(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stats_here))
    total = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *stats)
    joined = jax.tree.map(lambda *parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts), *kept)
    return carry[0], carry[1], joined, total


def _embed(fused: PyTree, tokens: Array, side: Side) -> Array:
    return jnp.take(fused["embed"], tokens, axis=0).astype(dtype_of(side.dtype))  # [..., D]


def _final_norm(x: Array, fused: PyTree, *, config: ModelConfig, side: Side) -> Array:
    return ops.rms_norm(x, fused["final_norm"], eps=config.rms_eps, order=side.order)


def _causal(queries: int, keys: int, first: Array | int = 0) -> Array:
    """[queries, keys] bool: query i, standing in column first + i, sees the columns up to its own."""
    return jnp.arange(keys)[None, :] <= first + jnp.arange(queries)[:, None]


def _over_rows(prefix_mask: Array, num_rows: int, width: int) -> Array:
    """A prompt's key mask for every query of its group: [P, S] -> [B, width, S]."""
    repeated = jnp.repeat(prefix_mask, num_rows // prefix_mask.shape[0], axis=0)
    return jnp.broadcast_to(repeated[:, None, :], (num_rows, width, prefix_mask.shape[1]))


def _check_length(config: ModelConfig, length: int) -> None:
    if length > config.max_length:
        raise ValueError(f"{length} columns exceed the model's max_length of {config.max_length}")


def forward(
    fused: PyTree,
    tokens: Array,
    *,
    config: ModelConfig,
    side: Side,
    positions: Array,
    token_mask: Array,
    prefix: KV | None = None,
    prefix_mask: Array | None = None,
    cache: KV | None = None,
    cache_index: Array | int | None = None,
    key: Array | None = None,
    hint: PyTree = None,
    stats: Stats = "off",
    remat: Remat = "none",
    trainable_from: int = 0,
) -> Forward:
    """Runs a block of tokens through the model.

    Args:
        fused: what `fuse` or publish made; a site's weight may be an Array, a QTensor or a
            prepared operand, stacked over layers.
        tokens: [B, T] int32.
        config, side: static.
        positions: [B, T] int32, counting real tokens from the prompt's first on.
        token_mask: [B, T] bool; padding is attended to by nobody and never counts.
        prefix: KV of the prompts, with P rows where B = P * group; read, never copied.
        prefix_mask: [P, S] bool, the real columns of `prefix`.
        cache: completion KV [L, B, S, K, C] into which the block is written.
        cache_index: [] int32, the column of the block's first token. Columns before it are
            taken to be real.
        key: typed PRNG key for stochastic rounding; hint: {site: pytree stacked over L}.
        stats: "on" counts per-site quantization outcomes.
        remat: "layer" recomputes each layer in the backward.
        trainable_from: layers below run without gradient (and so does the embedding lookup when
            it is above 0); nothing is saved for them.

    Returns:
        Forward: hidden [B, T, D], the KV (or the updated cache), statistics.

    Raises:
        ValueError: lengths beyond `max_length`, a prefix without its mask, a cache without its
            index.
    """
    rows, width = tokens.shape
    chex.assert_shape([positions, token_mask], (rows, width))
    _check_pairs(prefix=prefix, prefix_mask=prefix_mask, cache=cache, cache_index=cache_index)
    before = 0 if prefix_mask is None else prefix_mask.shape[1]
    _check_length(config, before + (width if cache is None else cache.k.shape[2]))
    seen = None if prefix_mask is None else _over_rows(prefix_mask, rows, width)
    scale = config.head_dim**-0.5
    if cache is None:
        own = _causal(width, width)[None] & token_mask[:, None, :]
        attend: Attend = _BlockAttention(seen, own, scale, side.order)
        extra: Any = prefix
    else:
        column = jnp.asarray(cache_index, jnp.int32)
        own = jnp.broadcast_to(_causal(width, cache.k.shape[2], column), (rows, width, cache.k.shape[2]))
        attend = _CacheAttention(seen, own, column, scale, side.order)
        extra = (prefix, jnp.arange(config.num_layers))
    run = _Run(
        attend,
        Tokens(*rope.rotations(positions, config, order=side.order), token_mask),
        config,
        side,
        stats,
        remat,
    )
    x, state, kept, totals = _run_layers(
        _embed(fused, tokens, side),
        fused["layers"],
        run,
        state=cache,
        extra=extra,
        key=key,
        hint=hint,
        trainable_from=trainable_from,
    )
    hidden = _final_norm(x, fused, config=config, side=side)
    return Forward(hidden=hidden, kv=kept if cache is None else state, stats=totals)


def _check_pairs(**given: Any) -> None:
    for first, second in (("prefix", "prefix_mask"), ("cache", "cache_index")):
        if (given[first] is None) != (given[second] is None):
            missing = first if given[first] is None else second
            raise ValueError(f"{first} and {second} go together: {missing} is missing")


def forward_groups(
    fused: PyTree,
    prompts: Array,
    completions: Array,
    *,
    prompt_mask: Array,
    completion_mask: Array,
    config: ModelConfig,
    side: Side,
    key: Array | None = None,
    hint: PyTree = None,
    stats: Stats = "off",
    remat: Remat = "none",
    trainable_from: int = 0,
) -> GroupForward:
    """Runs prompts and the completions that follow them in one pass.

    Each prompt is processed once for its whole group, and each layer's weights are read (and
    quantized) once for both. A token's result equals that of `forward`: prefill of the prompts,
    then the completions as a block over the prefix.

    Args:
        fused: as in `forward`.
        prompts: [P, Tp] int32, left-padded. prompt_mask: [P, Tp] bool.
        completions: [B, T] int32, right-padded, row b following prompt b // (B / P).
        completion_mask: [B, T] bool.
        The rest is as in `forward`.

    Returns:
        GroupForward: hidden of each prompt's last column [P, D], of the completions [B, T, D].
    """
    (num, width), (rows, block) = prompts.shape, completions.shape
    chex.assert_shape(prompt_mask, (num, width))
    chex.assert_shape(completion_mask, (rows, block))
    if rows % num:
        raise ValueError(f"{rows} completions do not divide over {num} prompts")
    _check_length(config, width + block)

    def pack(prompt: Array, completion: Array) -> Array:
        return jnp.concatenate([prompt, completion.reshape(num, -1)], axis=1)  # [P, Tp + G * T]

    lengths = jnp.repeat(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), rows // num)
    after = lengths[:, None] + positions_of(completion_mask)
    mask = pack(prompt_mask, completion_mask)
    attend = _GroupAttention(
        prompt_mask=_causal(width, width)[None] & prompt_mask[:, None, :],
        prefix_mask=_over_rows(prompt_mask, rows, block),
        own_mask=_causal(block, block)[None] & completion_mask[:, None, :],
        scale=config.head_dim**-0.5,
        order=side.order,
    )
    turns = rope.rotations(pack(positions_of(prompt_mask), after), config, order=side.order)
    run = _Run(attend, Tokens(*turns, mask), config, side, stats, remat)
    x, _, _, totals = _run_layers(
        _embed(fused, pack(prompts, completions), side),
        fused["layers"],
        run,
        state=None,
        extra=None,
        key=key,
        hint=hint,
        trainable_from=trainable_from,
    )
    wanted = jnp.concatenate([x[:, width - 1], x[:, width:].reshape(-1, x.shape[-1])])
    hidden = _final_norm(wanted, fused, config=config, side=side)
    return GroupForward(
        prompt_hidden=hidden[:num], hidden=hidden[num:].reshape(rows, block, -1), stats=totals
    )
