"""The tokens of rollouts through a side once more, by teacher forcing: as blocks, or one by one as sampled.

A token's log-prob is that of the distribution that the tokens before it give, whichever program computes it;
two programs of one policy differ in nothing but the geometry of their operations.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax import models
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.models import KV, ModelConfig, guidance, kv, routing
from fp4rl_jax.models.blocks import Stats
from fp4rl_jax.ops.spec import Capture, Side
from fp4rl_jax.rollout import SamplingConfig, sampler
from fp4rl_jax.rollout.state import SamplerState


@struct.dataclass
class Forced:
    """What a side computes of given tokens.

    Attributes:
        logprobs: [B, T] float32, nats, of the sampled tokens; 0 elsewhere.
        captured: {name: leaves [B, T, L, ...]}, in the layout of `Rollouts.guidance`; zeros at tokens that no
            sampler feeds: padding, and the last of a row.
        experts: [B, T, L, A] unsigned, in that layout, or None where nothing is watched.
        stats: of the prompts and of the completions, each as `models.Forward.stats`.
    """

    logprobs: Array
    captured: PyTree = struct.field(default_factory=dict)
    experts: Array | None = None
    stats: tuple[PyTree, PyTree] = ({}, {})


def fed(out: Rollouts) -> Array:
    """[B, T] bool: tokens that a sampler runs through the model, those of the prompt included.

    A completion's last token is not fed: nothing follows it.
    """
    width = out.prompt_width
    after = jnp.pad(jnp.asarray(out.loss_mask)[:, width + 1 :], ((0, 0), (0, 1)))
    return jnp.concatenate([jnp.asarray(out.token_mask)[:, :width], after], axis=1)


@partial(jax.jit, static_argnames=("config", "side", "temperature", "capture", "watch", "stats"))
def by_blocks(
    params: PyTree,
    out: Rollouts,
    hints: PyTree = None,
    *,
    config: ModelConfig,
    side: Side,
    temperature: float,
    capture: Capture | None = None,
    watch: routing.Watch = "off",
    stats: Stats = "off",
) -> Forced:
    """Prompts, each once for its group, then every completion as one block over its prompt.

    Args:
        params: a fused tree: of a published version, or of the trainer.
        out: the rollouts; [B, T].
        hints: what the side's layers are given, {name: leaves [B, T, L, ...]} as `Rollouts.guidance`.
        config, side, temperature: static.
        capture: what is recorded; the sites that it names are quantized by `side`.
        watch: "choices" gives the experts.
        stats: as `models.forward` takes it.

    Returns:
        Forced.
    """
    width, group = out.prompt_width, out.group_size
    tokens, mask = jnp.asarray(out.tokens), jnp.asarray(out.token_mask)
    common: dict[str, Any] = {"config": config, "side": side, "capture": capture, "watch": watch}
    prompts, prompt_mask = tokens[::group, :width], mask[::group, :width]
    prefix = models.forward(
        params, prompts, positions=models.positions_of(prompt_mask), token_mask=prompt_mask,
        hint=hints_of(hints, "prompts", out), stats=stats, **common,
    )  # fmt: skip
    block = models.forward(
        params, tokens[:, width:-1], positions=models.positions_of(mask)[:, width:-1],
        token_mask=fed(out)[:, width:-1], prefix=prefix.kv, prefix_mask=prompt_mask,
        hint=hints_of(hints, "completions", out), stats=stats, **common,
    )  # fmt: skip
    hidden = jnp.concatenate([jnp.repeat(prefix.hidden[:, -1:], group, axis=0), block.hidden], axis=1)
    return Forced(
        logprobs=picked(params, hidden, out, side=side, temperature=temperature),
        captured={} if capture is None else _recorded(prefix, block, out, capture),
        experts=None if watch == "off" or not config.num_experts else _experts(prefix, block, out, config),
        stats=(prefix.stats, block.stats),
    )


@partial(jax.jit, static_argnames=("config", "side", "temperature", "rows"))
def by_groups(
    params: PyTree,
    out: Rollouts,
    hints: PyTree = None,
    *,
    config: ModelConfig,
    side: Side,
    temperature: float,
    rows: int | None = None,
) -> Array:
    """Prompts and completions in one pass, as a trainer scores them, `rows` rows at a time (None: all).

    Arguments as `by_blocks`; `rows` divides B. A share of a group is a group of its own.

    Returns:
        [B, T] float32, nats.
    """
    num, width = out.tokens.shape[0], out.prompt_width
    rows = rows or num
    group = min(out.group_size, rows)
    scales, records = scales_of(hints), {n: x for n, x in (hints or {}).items() if n != kv.SCALES}
    shares = (jnp.asarray(out.tokens), jnp.asarray(out.token_mask), records)
    shares = jax.tree.map(lambda x: jnp.asarray(x).reshape(num // rows, rows, *x.shape[1:]), shares)

    def share(part: tuple[Array, Array, PyTree]) -> Array:
        tokens, mask, own = part
        found = models.forward_groups(
            params, tokens[::group, :width], tokens[:, width:-1], prompt_mask=mask[::group, :width],
            completion_mask=mask[:, width:-1], config=config, side=side,
            hint=guidance.pack_hint(scales | own, prompt_width=width, group_size=group),
        )  # fmt: skip
        return jnp.concatenate(
            [jnp.repeat(found.prompt_hidden, group, axis=0)[:, None], found.hidden], axis=1
        )

    hidden = jax.lax.map(share, shares).reshape(num, -1, config.d_model)
    return picked(params, hidden, out, side=side, temperature=temperature)


@partial(jax.jit, static_argnames=("config", "side", "temperature", "layers"))
def by_decoding(
    params: PyTree,
    out: Rollouts,
    hints: PyTree = None,
    *,
    config: ModelConfig,
    side: Side,
    temperature: float,
    layers: Literal["stacked", "apart"] = "stacked",
) -> Array:
    """One token a row at a time over the cache, with the sampler's own prefill and decode step.

    Arguments as `by_blocks`; `layers` as in `SamplingConfig`.

    Returns:
        [B, T] float32, nats.
    """
    width, group = out.prompt_width, out.group_size
    tokens, mask = jnp.asarray(out.tokens), jnp.asarray(out.token_mask)
    sampling = SamplingConfig(max_new_tokens=tokens.shape[1] - width)
    params = models.in_use(models.prepare(params, side), config, side, reads="often")
    before = (tokens[::group, :width], mask[::group, :width])
    prefix, first = sampler.prefill(
        params, *before, config=config, side=side, hint=hints_of(hints, "prompts", out)
    )
    limits = jnp.sum(jnp.asarray(out.loss_mask), axis=1, dtype=jnp.int32)
    state = sampler.empty_state(limits, prefix, config=config, side=side, sampling=sampling)
    state = dataclasses.replace(state, tokens=tokens[:, width:])
    starts = jnp.repeat(prefix.lengths, group)
    after, alive = hints_of(hints, "completions", out), fed(out)[:, width:]
    if layers == "apart":
        params = models.unstacked(params)

    def step(state: SamplerState, index: Array) -> tuple[SamplerState, Array]:
        state = dataclasses.replace(state, step=index + 1, alive=alive[:, index])
        hint = {
            name: tree
            if name == kv.SCALES
            else jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1, axis=2), tree)
            for name, tree in after.items()
        }
        return sampler.decode(params, prefix, state, starts, config=config, side=side, hint=hint)

    _, hidden = jax.lax.scan(step, state, jnp.arange(tokens.shape[1] - width - 1))
    hidden = jnp.concatenate([jnp.repeat(first, group, axis=0)[None], hidden])  # [Tc, B, D]
    return picked(params, jnp.moveaxis(hidden, 0, 1), out, side=side, temperature=temperature)


def picked(params: PyTree, hidden: Array, out: Rollouts, *, side: Side, temperature: float) -> Array:
    """Log-probs [B, T] float32 of the sampled tokens from the hidden states [B, Tc, D] before them.

    One row's logits exist at a time.
    """
    width = out.prompt_width

    def row(part: tuple[Array, Array]) -> Array:
        scores = models.tempered(models.logits(params, part[0], order=side.order), temperature)
        return models.pick_logprobs(scores, part[1], order=side.order)

    found = jax.lax.map(row, (hidden, jnp.asarray(out.tokens)[:, width:]))
    return jnp.pad(jnp.where(jnp.asarray(out.loss_mask)[:, width:], found, 0.0), ((0, 0), (width, 0)))


def hints_of(hints: PyTree, part: str, out: Rollouts) -> dict[str, PyTree]:
    """{name: leaves [L, rows, columns, ...]} of the "prompts", [P, Tp], or "completions", [B, Tc - 1].

    Static scales of a KV cache, the same in all rows, are [L, K].
    """
    width, group = out.prompt_width, out.group_size

    def cut(x: Array) -> Array:
        x = jnp.asarray(x)
        return jnp.moveaxis(x[::group, :width] if part == "prompts" else x[:, width:-1], 2, 0)

    return {
        name: jax.tree.map(lambda x: jnp.asarray(x)[0], tree)
        if name == kv.SCALES
        else jax.tree.map(cut, tree)
        for name, tree in (hints or {}).items()
    }


def _recorded(prefix: models.Forward, block: models.Forward, out: Rollouts, capture: Capture) -> PyTree:
    width, group, real = out.prompt_width, out.group_size, fed(out)
    before = guidance.by_column(prefix.captured, real[::group, :width], capture)
    after = guidance.by_column(block.captured, real[:, width:-1], capture)
    return jax.tree.map(lambda a, b: _joined(a, b, group, 0), before, after)


def _experts(prefix: models.Forward, block: models.Forward, out: Rollouts, config: ModelConfig) -> Array:
    dtype = routing.record_dtype(config)
    assert prefix.watched is not None and block.watched is not None
    both = (prefix.watched.experts, block.watched.experts)
    before, after = (jnp.moveaxis(experts, 0, 2).astype(dtype) for experts in both)
    found = _joined(before, after, out.group_size, routing.sentinel(dtype))
    return jnp.where(fed(out)[:, :, None, None], found, jnp.asarray(routing.sentinel(dtype), dtype))


def _joined(prompts: Array, completions: Array, group: int, fill: int) -> Array:
    """[P, Tp, ...] and [B, Tc - 1, ...] as [B, Tp + Tc, ...]; `fill` in the last column."""
    joined = jnp.concatenate([jnp.repeat(prompts, group, axis=0), completions], axis=1)
    rest = [(0, 0)] * (joined.ndim - 2)
    return jnp.pad(joined, [(0, 0), (0, 1), *rest], constant_values=fill)


def scales_of(hints: PyTree) -> dict[str, KV]:
    """The static scales of a KV cache among records: what every side is given."""
    return {name: tree for name, tree in (hints or {}).items() if name == kv.SCALES}
