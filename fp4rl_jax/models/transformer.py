"""Tokens to hidden states, in three ways.

- `forward` over whole sequences (prefill), or over a block that follows a shared prefix;
- `forward` with a `cache`: one new token per row, written into the cache (decode);
- `forward_groups`: prompts and their completions in one pass, every weight used once (scoring
  and training).

All three run `blocks.layer` through `stack.run_layers`; `sequences` says how their tokens attend.
"""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
from flax import struct

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree, dtype_of
from fp4rl_jax.models import rope
from fp4rl_jax.models.blocks import Attend, Stats, Tokens
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.kv import KV
from fp4rl_jax.models.routing import Watch, Watched
from fp4rl_jax.models.sequences import (
    BlockAttention,
    CacheAttention,
    GroupAttention,
    StackedAttention,
    causal,
    over_rows,
    positions_of,
)
from fp4rl_jax.models.stack import Remat, Run, run_layers
from fp4rl_jax.ops.spec import Capture, Side
from fp4rl_jax.parallel import BATCH, constrain, constrain_rows


@struct.dataclass
class Forward:
    """What `forward` returns.

    Attributes:
        hidden: [B, T, D] in the activation dtype, after the final norm.
        kv: the block's own keys and values [L, B, K, T, C], as the cache keeps them; with a cache, the
            updated cache.
        stats: {site: {"act" | "weight": sums over layers}}; empty unless asked for.
        watched: what the routers did, stacked over L; None unless asked for.
        captured: {site: its quantized input [L, B, T, ...] in the form asked for}; empty unless asked for.
    """

    hidden: Array
    kv: KV
    stats: PyTree
    watched: Watched | None = None
    captured: PyTree = struct.field(default_factory=dict)


@struct.dataclass
class GroupForward:
    """What `forward_groups` returns.

    Attributes:
        prompt_hidden: [P, D], after the final norm, of each prompt's last column.
        hidden: [B, T, D], after the final norm, of the completion columns.
        stats, watched: as in `Forward`.
    """

    prompt_hidden: Array
    hidden: Array
    stats: PyTree
    watched: Watched | None = None


def _embed(fused: PyTree, tokens: Array, side: Side) -> Array:
    # An uneven split of the rows, which XLA may choose, adds its padding to the gradient of row 0.
    tokens = constrain(tokens, BATCH, side.layout)
    x = jnp.take(fused["embed"], tokens, axis=0).astype(dtype_of(side.dtype))  # [..., D]
    return constrain(x, BATCH, side.layout)


def _final_norm(x: Array, fused: PyTree, *, config: ModelConfig, side: Side) -> Array:
    return ops.rms_norm(x, fused["final_norm"], eps=config.rms_eps, order=side.order)


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
    segments: Array | None = None,
    key: Array | None = None,
    hint: PyTree = None,
    stats: Stats = "off",
    remat: Remat = "none",
    trainable_from: int = 0,
    watch: Watch = "off",
    capture: Capture | None = None,
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
        prefix_mask: [P, S] bool, the real columns of `prefix`, the last of each row.
        cache: completion KV [L, B, K, S, C] into which the block is written.
        cache_index: [] int32, the column of the block's first token. Columns before it are
            taken to be real.
        segments: [B, T] int32, columns of one value form a sequence of their own; without a cache.
        key: typed PRNG key for stochastic rounding; hint: {site: pytree stacked over L, or
            over the deepest layers}; the static scales of a quantized KV cache are one
            (`kv.SCALES`).
        stats: which per-site quantization outcomes are counted (`ops.stats`); a SiteSpecs gives
            `ops.inputs.Seen` of every site's input, stacked over L, of what those specs ask for; a
            `blocks.Look` gives what it makes of it, likewise.
        remat: "layer" recomputes each layer in the backward.
        trainable_from: layers below run without gradient (and so does the embedding lookup when
            it is above 0); nothing is saved for them.
        watch: what is returned of the routers, where there are experts.
        capture: the sites whose quantized inputs are returned, of all layers.

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
    scale = config.head_dim**-0.5
    stacked = _stacked(config, side, width=width, prefix=prefix, cache=cache)
    if not stacked:  # there both are filled up to whole steps
        _check_length(config, before + (width if cache is None else cache.k.shape[3]))
    seen = None if prefix_mask is None else over_rows(prefix_mask, rows, width)
    if stacked and prefix is not None and prefix_mask is not None:
        column = jnp.asarray(cache_index, jnp.int32)
        starts = before - jnp.sum(prefix_mask, axis=1, dtype=jnp.int32)
        lengths = jnp.broadcast_to(column + 1, (rows,))
        attend: Attend = StackedAttention(prefix, starts, column, lengths, scale, side)
        extra: Any = np.arange(config.num_layers, dtype=np.int32)
    elif cache is None:
        own = causal(width, width)[None] & token_mask[:, None, :]
        if segments is not None:
            own &= segments[:, :, None] == segments[:, None, :]
        attend = BlockAttention(seen, own, scale, side)
        extra = prefix
    else:
        column = jnp.asarray(cache_index, jnp.int32)
        own = jnp.broadcast_to(causal(width, cache.k.shape[3], column), (rows, width, cache.k.shape[3]))
        attend = CacheAttention(seen, own, column, scale, side)
        extra = (prefix, jnp.arange(config.num_layers))
    run = Run(
        attend,
        Tokens(*rope.rotations(positions, config, order=side.order), token_mask),
        config,
        side,
        stats,
        remat,
        watch,
        capture,
    )
    x, state, (kept, watched, captured), totals = run_layers(
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
    return Forward(
        hidden=hidden,
        kv=kept if cache is None else state,
        stats=totals,
        watched=watched,
        captured=captured,
    )


def _stacked(config: ModelConfig, side: Side, *, width: int, prefix: KV | None, cache: KV | None) -> bool:
    """Whether this is a decode step whose attention reads prefix and cache where they lie."""
    if prefix is None or cache is None or width != 1 or side.kv is not None:
        return False
    refused = ops.decode_refusal(
        side,
        rows=cache.k.shape[1],
        prompts=prefix.k.shape[1],
        heads=(config.num_heads, config.num_kv_heads),
        head_dim=config.head_dim,
        columns=(prefix.k.shape[3], cache.k.shape[3]),
    )
    return refused is None


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
    watch: Watch = "off",
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
    prompts, prompt_mask = constrain_rows((prompts, prompt_mask), side.layout)

    def pack(prompt: Array, completion: Array) -> Array:
        return jnp.concatenate(
            [prompt, completion.reshape(num, rows // num * block)], axis=1
        )  # [P, Tp + G * T]

    lengths = jnp.repeat(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), rows // num)
    after = lengths[:, None] + positions_of(completion_mask)
    mask = pack(prompt_mask, completion_mask)
    attend = GroupAttention(
        prompt_mask=causal(width, width)[None] & prompt_mask[:, None, :],
        prefix_mask=over_rows(prompt_mask, rows, block),
        own_mask=causal(block, block)[None] & completion_mask[:, None, :],
        scale=config.head_dim**-0.5,
        side=side,
    )
    turns = rope.rotations(pack(positions_of(prompt_mask), after), config, order=side.order)
    run = Run(attend, Tokens(*turns, mask), config, side, stats, remat, watch)
    x, _, (_, watched, _), totals = run_layers(
        _embed(fused, pack(prompts, completions), side),
        fused["layers"],
        run,
        state=None,
        extra=None,
        key=key,
        hint=hint,
        trainable_from=trainable_from,
    )
    wanted = jnp.concatenate([x[:, width - 1], x[:, width:].reshape(rows * block, x.shape[-1])])
    hidden = _final_norm(wanted, fused, config=config, side=side)
    return GroupForward(
        prompt_hidden=hidden[:num],
        hidden=hidden[num:].reshape(rows, block, config.d_model),
        stats=totals,
        watched=watched,
    )
