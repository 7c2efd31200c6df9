"""The reference sampler: prefill each prompt once per group, then decode in a while_loop.

One jitted program with static shapes and no host sync per token. Three properties hold by
construction and are tested: a row's tokens depend on its own prompt, key and limit only; the
log-probs come from the function that scoring uses; the cache lives and dies inside the call, so
it can never meet another version of the parameters.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.models import ModelConfig, guidance, logprobs, routing
from fp4rl_jax.objectives.means import add_sums
from fp4rl_jax.ops import Stats
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.parallel import constrain, constrain_whole, put_rows
from fp4rl_jax.rollout.choose import choose
from fp4rl_jax.rollout.config import SamplingConfig
from fp4rl_jax.rollout.publish import Published
from fp4rl_jax.rollout.state import Prefix, SamplerState


def sample(
    published: Published,
    prompts: Array | np.ndarray,
    prompt_mask: Array | np.ndarray,
    *,
    row_limits: Array | np.ndarray,
    keys: Array,
    config: ModelConfig,
    side: Side,
    sampling: SamplingConfig,
    group_size: int = 1,
    stats: Stats = "off",
    provenance: Mapping[str, str] | None = None,
) -> Rollouts:
    """Samples `group_size` completions of every prompt.

    Args:
        published: rollout parameters and their version.
        prompts: [P, Tp] int32, left-padded to a width that stays the same from call to call (a
            new width compiles a new program).
        prompt_mask: [P, Tp] bool, True on prompt tokens; at least the last column of each row.
        row_limits: [B] int32, most tokens a row may sample; 0 samples nothing (a dummy row).
            B = P * group_size, rows of one prompt adjacent.
        keys: [B] typed PRNG keys, see `row_keys`.
        config: the model.
        side: the rollout side.
        sampling: temperature, limits and stop tokens.
        group_size: completions a prompt.
        stats: which tokens' quantization is counted, prompts and completions alike; see `ops.stats`.
        provenance: facts to record on the result beside the ones known here.

    Returns:
        Rollouts, [B, Tp + max_new_tokens] each. The log-probs are those of the full softmax at
        the sampling temperature (at 1 when greedy), whatever top-k, top-p or min-p cut away.
        `params_version` is the published version, fixed when the call is made.

    Raises:
        ValueError: prompt + completion is longer than the model's max_length, or the side captures a
            site that cannot be.
        AssertionError: an argument has the wrong shape.
    """
    arguments = _arguments(
        published, prompts, prompt_mask, row_limits, keys, config, side, sampling, group_size, stats
    )
    arrays = _sample(*arguments)
    return _rollouts(arrays, published, prompts.shape[1], side, sampling, group_size, provenance)


def lower_sample(
    published: Published,
    prompts: Array | np.ndarray,
    prompt_mask: Array | np.ndarray,
    *,
    row_limits: Array | np.ndarray,
    keys: Array,
    config: ModelConfig,
    side: Side,
    sampling: SamplingConfig,
    group_size: int = 1,
    stats: Stats = "off",
) -> tuple[jax.stages.Lowered, Rollouts]:
    """The program that `sample` runs for arguments of these shapes, before it is compiled.

    Args:
        As for `sample`; arrays may be abstract (ShapeDtypeStruct).

    Returns:
        The program, which `sample` need not compile once its `compile` was called; and what it returns, of
        ShapeDtypeStructs. Raises what `sample` raises.
    """
    lowered = _sample.lower(
        *_arguments(
            published, prompts, prompt_mask, row_limits, keys, config, side, sampling, group_size, stats
        )
    )
    found = _rollouts(lowered.out_info, published, prompts.shape[1], side, sampling, group_size, None)
    return lowered, found


def _arguments(
    published: Published,
    prompts: Any,
    prompt_mask: Any,
    row_limits: Any,
    keys: Array,
    config: ModelConfig,
    side: Side,
    sampling: SamplingConfig,
    group_size: int,
    stats: Stats,
) -> tuple[Any, ...]:
    """The arguments of `_sample`, checked as `sample` says."""
    num_prompts, prompt_width = prompts.shape
    chex.assert_shape(prompt_mask, (num_prompts, prompt_width))
    chex.assert_shape([row_limits, keys], (num_prompts * group_size,))
    guidance.check_capture(side.specs)
    total = prompt_width + sampling.max_new_tokens
    if total > config.max_length:
        raise ValueError(
            f"prompt_width {prompt_width} + max_new_tokens {sampling.max_new_tokens} = {total} is more than "
            f"the model's max_length {config.max_length}"
        )
    rows = put_rows((prompts, prompt_mask, row_limits, keys), side.layout)
    return published.params, *rows, published.hint, config, side, sampling, group_size, stats


def _rollouts(
    arrays: Mapping[str, PyTree],
    published: Published,
    prompt_width: int,
    side: Side,
    sampling: SamplingConfig,
    group_size: int,
    provenance: Mapping[str, str] | None,
) -> Rollouts:
    facts = {
        "rollout.dtype": side.dtype,
        "rollout.order": side.order,
        "rollout.temperature": str(sampling.temperature),
        **(provenance or {}),
    }
    return Rollouts(
        **arrays,
        params_version=published.version,
        prompt_width=prompt_width,
        group_size=group_size,
        provenance=tuple(sorted(facts.items())),
    )


@partial(jax.jit, static_argnames=("config", "side", "sampling", "group_size", "stats"))
def _sample(
    params: PyTree,
    prompts: Array,
    prompt_mask: Array,
    row_limits: Array,
    keys: Array,
    hint: PyTree,
    config: ModelConfig,
    side: Side,
    sampling: SamplingConfig,
    group_size: int,
    stats: Stats,
) -> dict[str, PyTree]:
    """The compiled program: the array fields of Rollouts as a dict."""
    params = models.in_use(models.prepare(params, side), config, side, reads="often")
    prefix, hidden = prefill(params, prompts, prompt_mask, config=config, side=side, stats=stats, hint=hint)
    state = empty_state(row_limits, prefix, config=config, side=side, sampling=sampling)
    emit = partial(_emit, row_limits=row_limits, keys=keys, side=side, sampling=sampling)
    state = emit(state, jnp.repeat(models.logits(params, hidden, order=side.order), group_size, axis=0))
    starts = jnp.repeat(prefix.lengths, group_size)  # [B]
    params = models.unstacked(params) if sampling.layers == "apart" else params

    def body(state: SamplerState) -> SamplerState:
        state, hidden = decode(
            params, prefix, state, starts, config=config, side=side, stats=stats, hint=hint
        )
        return emit(state, models.logits(params, hidden, order=side.order))

    state = jax.lax.while_loop(lambda state: jnp.any(state.alive), body, state)
    before = (
        jnp.repeat(prompts, group_size, axis=0),
        jnp.repeat(prompt_mask, group_size, axis=0),
    )
    nothing = jnp.zeros_like(before[1])
    recorded = _guidance(prefix, state, hint, group_size=group_size) | _candidates(state, prompts.shape[1])
    found = recorded | {
        "tokens": jnp.concatenate([before[0], state.tokens], axis=1),
        "token_mask": jnp.concatenate([before[1], state.sampled], axis=1),
        "loss_mask": jnp.concatenate([nothing, state.sampled], axis=1),
        "rollout_logprobs": jnp.concatenate([nothing.astype(jnp.float32), state.logprobs], axis=1),
        "finished": state.finished,
        "stats": state.stats,
    }
    return constrain_whole(found, side.layout)


def _guidance(prefix: Prefix, state: SamplerState, hint: PyTree, *, group_size: int) -> dict[str, PyTree]:
    """The records of all columns, {"guidance": {name: leaves [B, T, L, ...]}}; nothing where nothing is kept.

    A prompt's record, made once, is the same in all rows of its group; so are the version's KV scales,
    [B, L, K], which the trainer's cache needs.
    """
    rows = state.alive.shape[0]
    found = jax.tree.map(lambda scale: jnp.broadcast_to(scale, (rows, *scale.shape)), hint)
    before, after = dict(prefix.captured), dict(state.captured)
    if prefix.routes is not None:
        before[routing.RECORD], after[routing.RECORD] = prefix.routes, state.routes

    def joined(prompts: Array, completions: Array) -> Array:
        return jnp.concatenate([jnp.repeat(prompts, group_size, axis=0), completions], axis=1)

    found |= jax.tree.map(joined, before, after)
    return {"guidance": found} if found else {}


def _candidates(state: SamplerState, prompt_width: int) -> dict[str, PyTree]:
    """The recorded likeliest tokens of all columns, zeros in the prompt's; nothing where nothing is kept."""
    if state.candidates is None or state.candidate_logprobs is None:
        return {}
    pad = ((0, 0), (prompt_width, 0), (0, 0))
    return {
        "candidates": jnp.pad(state.candidates, pad),
        "candidate_logprobs": jnp.pad(state.candidate_logprobs, pad),
    }


def _likeliest(scores: Array, token: Array, logprob: Array, count: int) -> tuple[Array, Array]:
    """([B, k] int32, [B, k] float32 nats) of tempered logits [B, V], from one token's own log-prob."""
    best, tokens = jax.lax.top_k(scores, count)
    own = jnp.take_along_axis(scores, token[:, None], axis=1)
    return tokens.astype(jnp.int32), logprob[:, None] + (best - own)


def _record(out: models.Forward, real: Array, config: ModelConfig) -> Array | None:
    """[B, T, L, A] unsigned experts of a forward, the sentinel on padding; None if not watched."""
    if out.watched is None:
        return None
    dtype = routing.record_dtype(config)
    experts = jnp.moveaxis(out.watched.experts, 0, 2).astype(dtype)
    return jnp.where(real[:, :, None, None], experts, jnp.asarray(routing.sentinel(dtype), dtype))


def _captured(out: models.Forward, real: Array, side: Side) -> PyTree:
    """{site: hint of leaves [B, T, L, ...]} of a forward, zeros on padding; empty if nothing is captured."""
    capture = side.specs.capture
    return {} if capture is None else guidance.by_column(out.captured, real, capture)


def _watch(config: ModelConfig, side: Side) -> routing.Watch:
    return "choices" if config.num_experts and side.replay != "off" else "off"


def prefill(
    params: PyTree,
    prompts: Array,
    prompt_mask: Array,
    *,
    config: ModelConfig,
    side: Side,
    stats: Stats = "off",
    hint: PyTree = None,
) -> tuple[Prefix, Array]:
    """Runs every prompt once.

    Args:
        params: prepared rollout parameters.
        prompts: [P, Tp] int32, left-padded.
        prompt_mask: [P, Tp] bool.
        config: the model.
        side: the rollout side.
        stats: as in `sample`.
        hint: the published version's.

    Returns:
        The prefix, and the hidden state of each prompt's last token, [P, D].
    """
    positions = jnp.maximum(jnp.cumsum(prompt_mask, axis=1, dtype=jnp.int32) - 1, 0)
    out = models.forward(
        params,
        prompts,
        config=config,
        side=side,
        positions=positions,
        token_mask=prompt_mask,
        hint=hint,
        stats=stats,
        watch=_watch(config, side),
        capture=side.specs.capture,
    )
    lengths = jnp.sum(prompt_mask, axis=1, dtype=jnp.int32)
    columns = models.decode_columns(prompts.shape[1], config, side)
    kv, mask = models.filled_up(out.kv, prompt_mask, columns)
    prefix = Prefix(
        kv=kv,
        mask=mask,
        lengths=lengths,
        stats=out.stats,
        routes=_record(out, prompt_mask, config),
        captured=_captured(out, prompt_mask, side),
    )
    return prefix, out.hidden[:, -1]


def decode(
    params: PyTree,
    prefix: Prefix,
    state: SamplerState,
    starts: Array,
    *,
    config: ModelConfig,
    side: Side,
    stats: Stats = "off",
    hint: PyTree = None,
) -> tuple[SamplerState, Array]:
    """Runs the newest token of every row through the model and extends the cache by it.

    Args:
        params: prepared rollout parameters.
        prefix: the prompts' cache.
        state: `step` tokens are written and `step - 1` of them are cached.
        starts: [B] int32, position of each row's first completion token.
        config: the model.
        side: the rollout side.
        stats: as in `sample`; what is counted here is added to the state's.
        hint: the published version's.

    Returns:
        The state with the longer cache, and the new token's hidden state, [B, D].
    """
    index = state.step - 1
    newest = jax.lax.dynamic_slice_in_dim(state.tokens, index, 1, axis=1)  # [B, 1]
    out = models.forward(
        params,
        newest,
        config=config,
        side=side,
        positions=(starts + index)[:, None],
        token_mask=state.alive[:, None],
        prefix=prefix.kv,
        prefix_mask=prefix.mask,
        cache=state.cache,
        cache_index=index,
        hint=hint,
        stats=stats,
        watch=_watch(config, side),
        capture=side.specs.capture,
    )
    routes, found = state.routes, _record(out, state.alive[:, None], config)
    if routes is not None and found is not None:
        routes = jax.lax.dynamic_update_slice_in_dim(routes, found, index, axis=1)
    captured = jax.tree.map(
        lambda kept, new: jax.lax.dynamic_update_slice_in_dim(kept, new, index, axis=1),
        state.captured,
        _captured(out, state.alive[:, None], side),
    )
    counted = add_sums(state.stats, out.stats)
    state = dataclasses.replace(state, cache=out.kv, stats=counted, routes=routes, captured=captured)
    return state, out.hidden[:, 0]


def _emit(
    state: SamplerState,
    logits: Array,
    *,
    row_limits: Array,
    keys: Array,
    side: Side,
    sampling: SamplingConfig,
) -> SamplerState:
    """Samples one token in every living row from logits [B, V] and ends the rows that are done."""
    step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
    scores = logprobs.tempered(logits, sampling.logprob_temperature)
    token = jnp.where(state.alive, choose(scores, step_keys, sampling), sampling.pad_token)
    logprob = logprobs.pick_logprobs(scores, token, order=side.order)
    likeliest = (state.candidates, state.candidate_logprobs)
    if sampling.num_candidates:
        found = _likeliest(scores, token, logprob, sampling.num_candidates)
        likeliest = jax.tree.map(
            lambda column, x: jax.lax.dynamic_update_slice_in_dim(column, x[:, None], state.step, axis=1),
            likeliest,
            found,
        )
    logprob = jnp.where(state.alive, logprob, 0.0)
    stopped = state.alive & jnp.isin(token, jnp.asarray(sampling.stop_tokens, jnp.int32))
    step = state.step + 1
    limits = jnp.minimum(row_limits, sampling.max_new_tokens)

    def write(column: Array, values: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(column, values[:, None], state.step, axis=1)

    return dataclasses.replace(
        state,
        step=step,
        tokens=write(state.tokens, token.astype(jnp.int32)),
        logprobs=write(state.logprobs, logprob),
        sampled=write(state.sampled, state.alive),
        alive=state.alive & ~stopped & (step < limits),
        finished=state.finished | stopped,
        candidates=likeliest[0],
        candidate_logprobs=likeliest[1],
    )


def _cache(config: ModelConfig, side: Side, *, num_rows: int, width: int) -> models.KV:
    """An empty completion cache, rows and heads shared out."""
    columns = models.decode_columns(models.cache_width(width), config, side)
    cache = models.new_cache(
        config,
        num_rows=num_rows,
        completion_width=width,
        dtype=side.dtype,
        quantizer=side.kv,
        columns=columns,
    )
    axes = (None, "batch", "kv_heads" if side.order == "free" else None)
    return jax.tree.map(lambda leaf: constrain(leaf, axes, side.layout), cache)


def empty_state(
    row_limits: Array, prefix: Prefix, *, config: ModelConfig, side: Side, sampling: SamplingConfig
) -> SamplerState:
    """The state before the first token: nothing written, rows with a positive limit alive.

    Args:
        row_limits: [B] int32. prefix: what `prefill` left.
        config: the model. side: the rollout side. sampling: widths and candidates.
    """
    batch, width = row_limits.shape[0], sampling.max_new_tokens
    routes = None
    if _watch(config, side) != "off":
        dtype = routing.record_dtype(config)
        shape = (batch, width, config.num_layers, config.num_active)
        routes = jnp.full(shape, routing.sentinel(dtype), dtype)
    shape = (batch, width, sampling.num_candidates)
    asked = sampling.num_candidates > 0
    captured = jax.tree.map(
        lambda leaf: jnp.zeros((batch, width, *leaf.shape[2:]), leaf.dtype), prefix.captured
    )
    return SamplerState(
        candidates=jnp.zeros(shape, jnp.int32) if asked else None,
        candidate_logprobs=jnp.zeros(shape, jnp.float32) if asked else None,
        step=jnp.int32(0),
        tokens=jnp.full((batch, width), sampling.pad_token, jnp.int32),
        logprobs=jnp.zeros((batch, width), jnp.float32),
        sampled=jnp.zeros((batch, width), bool),
        alive=row_limits > 0,
        finished=jnp.zeros(batch, bool),
        cache=_cache(config, side, num_rows=batch, width=width),
        stats=prefix.stats,
        routes=routes,
        captured=captured,
    )
