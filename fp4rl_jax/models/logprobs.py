"""Log-probabilities of tokens under the model: one definition for sampler, trainer and evaluation.

Nats, at the sampling temperature, over the whole vocabulary. The [B, T, V] logits never exist:
tokens go through the head in chunks, real tokens only, and the backward recomputes what it needs.
"""

import dataclasses
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.models.blocks import Stats
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.guidance import pack_hint, packed_hint
from fp4rl_jax.models.numerics import round_to, sum_last
from fp4rl_jax.models.params import head_weight
from fp4rl_jax.models.placement import in_use
from fp4rl_jax.models.routing import Watch, Watched
from fp4rl_jax.models.stack import Remat
from fp4rl_jax.models.transformer import forward, forward_groups
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops.spec import HIGH_PRECISION, Order, Side
from fp4rl_jax.parallel import BATCH, Layout, constrain

Entropy = Literal["off", "on"]


@struct.dataclass
class Scores:
    """What `score` returns, in the layout of the batch.

    Attributes:
        logprobs: [B, T] float32 nats; `logprobs[b, t]` scores `tokens[b, t]`; 0 on prompt and
            padding.
        entropy: [B, T] float32 nats, of the distribution that token t was drawn from, without
            gradient; None unless asked for.
        stats: quantization statistics by site, or an empty dict.
        watched: what the routers did, prompts included, stacked over L; None unless asked for.
        candidates: [B, T, k] float32 nats, of the tokens asked for, differentiable; 0 where there are none.
    """

    logprobs: Array
    entropy: Array | None
    stats: PyTree
    watched: Watched | None = None
    candidates: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    """Static description of one pass through the head."""

    temperature: float
    chunk: int
    order: Order
    entropy: Entropy
    layout: Layout | None = None


def logits(fused: PyTree, hidden: Array, *, order: Order = "free") -> Array:
    """Scores of every vocabulary entry.

    Args:
        fused: tree with the head (or the tied embedding) [V, D].
        hidden: [..., D], after the final norm.

    Returns:
        [..., V] float32: operands in hidden's dtype, float32 accumulation, no rounding after.
    """
    head = _prepared_head(fused, hidden.dtype)
    return ops.matmul(hidden, head, HIGH_PRECISION, order=order, out_dtype=jnp.float32)


def tempered(scores: Array, temperature: float) -> Array:
    """Divides logits by the temperature, the same way on both sides.

    Raises:
        ValueError: the temperature is not positive (greedy decoding has no log-probability).
    """
    if not temperature > 0:
        raise ValueError(f"log-probabilities need a temperature above 0, got {temperature}")
    return scores if temperature == 1.0 else scores * (1.0 / temperature)


def pick_logprobs(scores: Array, targets: Array, *, order: Order = "free") -> Array:
    """Log-softmax of tempered logits at one entry a row.

    Args:
        scores: [..., V] float32. targets: [...] int32.

    Returns:
        [...] float32 nats.
    """
    if order == "fixed":
        scores = jax.lax.optimization_barrier(scores)
    top, total, _ = _normaliser(scores, order)
    return (_at(scores, targets) - top) - ops.pointwise(jnp.log, total, order=order)


def _normaliser(scores: Array, order: Order) -> tuple[Array, Array, Array]:
    """Row maximum, sum of exp(score - maximum), and those exponentials."""
    top = jnp.max(scores, axis=-1)
    weights = ops.pointwise(jnp.exp, scores - top[..., None], order=order)
    return top, sum_last(weights, order=order), weights


def _at(scores: Array, targets: Array) -> Array:
    """The entry of each row at its target, as an exact sum with one non-zero term (no gather)."""
    hit = jax.lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]
    return jnp.sum(jnp.where(hit, scores, 0.0), axis=-1)


def _prepared_head(fused: PyTree, dtype: Any) -> ops.Prepared:
    """The head as a dot operand, rounded to the activation dtype."""
    head = head_weight(fused)
    if isinstance(head, ops.Prepared):
        return head
    prepared = ops.prepare_weight(round_to(head, dtype))
    assert isinstance(prepared, ops.Prepared)  # of an array
    return prepared


def _scores(rows: Array, head: Array, order: Order) -> Array:
    """`logits` of one chunk from an operand that is prepared already: [M, D] -> [M, V] float32."""
    operand = ops.Prepared(operand=head, source=rows.dtype.name)
    return ops.matmul(rows, operand, HIGH_PRECISION, order=order, out_dtype=jnp.float32)


def _head_transpose(slope: Array, head: Array, dtype: Any, order: Order) -> Array:
    """slope [M, V] times head [V, D] -> [M, D] float32; slope is rounded to the activation dtype."""
    return kernels.matmul(round_to(slope, dtype).astype(head.dtype), head, dims=(1, 0), order=order)


def _outer(slope: Array, hidden: Array, dtype: Any) -> Array:
    """slope [M, V] transposed times hidden [M, D] -> [V, D] float32, a sum over rows by nature."""
    slope = round_to(slope, hidden.dtype).astype(dtype)
    return kernels.matmul(slope, hidden.astype(dtype), dims=(0, 0))


def token_logprobs(
    fused: PyTree,
    hidden: Array,
    targets: Array,
    *,
    temperature: float,
    mask: Array | None = None,
    chunk: int = 128,
    order: Order = "free",
    entropy: Entropy = "off",
    layout: Layout | None = None,
) -> tuple[Array, Array | None]:
    """Log-probability of one target for each hidden state, chunk by chunk.

    Only chunks with real tokens are computed: real rows are moved to the front first. When the
    head is not differentiated, the gradient to `hidden` is formed during the forward, one [D]
    vector a token, so no logits are computed twice; when it is, the backward recomputes them.

    Args:
        fused: tree with the head; differentiated only if it is being traced for gradients.
        hidden: [N, D], after the final norm. targets: [N] int32.
        temperature: > 0, static.
        mask: [N] bool, rows to compute; the others give 0. All by default.
        chunk: rows whose [chunk, V] logits exist at a time.
        order: "fixed" gives a row the same bits in every batch.
        entropy: "on" also returns the entropy of each row's distribution, without gradient.
        layout: of the mesh, whose devices share out the rows of every chunk.

    Returns:
        logprobs [N] float32 nats, and entropy [N] float32 nats or None.
    """
    num = hidden.shape[0]
    mask = jnp.ones(num, bool) if mask is None else mask
    chunk = max(1, min(chunk, num))
    padding = -num % chunk
    front = jnp.argsort(~mask, stable=True)
    rows = jnp.pad(front, (0, padding))
    num_chunks = (jnp.sum(mask, dtype=jnp.int32) + chunk - 1) // chunk
    spec = _Head(temperature=temperature, chunk=chunk, order=order, entropy=entropy, layout=layout)
    head = _prepared_head(fused, hidden.dtype)
    packed, spread = _packed_logprobs(spec, hidden[rows], head.operand, targets[rows], num_chunks)
    back = jnp.argsort(front)
    logprobs = jnp.where(mask, packed[:num][back], 0.0)
    if entropy == "off":
        return logprobs, None
    return logprobs, jnp.where(mask, jax.lax.stop_gradient(spread[:num][back]), 0.0)


def candidate_logprobs(
    fused: PyTree,
    hidden: Array,
    targets: Array,
    logprobs: Array,
    candidates: Array,
    *,
    temperature: float,
    chunk: int = 128,
) -> Array:
    """Log-probabilities of further tokens of each row, from that of its target and differences of logits.

    Args:
        fused: tree with the head. hidden: [N, D], after the final norm. targets: [N] int32.
        logprobs: [N] float32, of the targets (`token_logprobs`).
        candidates: [N, k] int32.
        temperature: > 0, static.
        chunk: rows whose [chunk, k, D] weights exist at a time; the backward recomputes them.

    Returns:
        [N, k] float32 nats, differentiable in hidden, head and logprobs.
    """
    num = hidden.shape[0]
    chunk = max(1, min(chunk, num))
    head = _prepared_head(fused, hidden.dtype).operand

    @jax.checkpoint
    def gaps(part: tuple[Array, Array]) -> Array:
        rows, tokens = part  # [chunk, D], [chunk, 1 + k]
        scores = jnp.einsum(
            "md,mkd->mk", rows.astype(head.dtype), head[tokens], precision="highest",
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return tempered(scores[:, 1:] - scores[:, :1], temperature)

    tokens = jnp.concatenate([targets[:, None], candidates], axis=1)
    parts = [jnp.pad(x, ((0, -num % chunk), (0, 0))).reshape(-1, chunk, x.shape[1]) for x in (hidden, tokens)]
    found = jax.lax.map(gaps, tuple(parts)).reshape(-1, candidates.shape[1])[:num]
    return logprobs[:, None] + found


def _rows(x: Array, index: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk)


def _put(x: Array, value: Array, index: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, value, index * value.shape[0], axis=0)


def _chunk_values(spec: _Head, scores: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Of one chunk's raw logits [chunk, V]: log-probs, entropies, and d logprob / d logits."""
    scores = tempered(scores, spec.temperature)
    if spec.order == "fixed":
        scores = jax.lax.optimization_barrier(scores)
    top, total, weights = _normaliser(scores, spec.order)
    log_total = ops.pointwise(jnp.log, total, order=spec.order)
    logprobs = (_at(scores, targets) - top) - log_total
    probs = weights / total[:, None]
    if spec.entropy == "on":
        terms = probs * (scores - top[:, None])
        spread = log_total - sum_last(terms, order=spec.order)
    else:
        spread = jnp.zeros_like(logprobs)
    hit = jax.lax.broadcasted_iota(targets.dtype, scores.shape, 1) == targets[:, None]
    slope = jnp.where(hit, 1.0 - probs, -probs)
    return logprobs, spread, slope if spec.temperature == 1.0 else slope * (1.0 / spec.temperature)


def _forward_chunks(
    spec: _Head,
    hidden: Array,
    head: Array,
    targets: Array,
    num_chunks: Array,
    *,
    slopes: Literal["drop", "keep"],
) -> tuple[Array, Array, Array | None]:
    """Runs the head over the first `num_chunks` chunks.

    Returns:
        logprobs [N], entropy [N], and with slopes="keep" d logprob / d hidden [N, D] float32.
    """

    def step(index: Array, carry: Any) -> Any:
        logprobs, spread, pulls = carry
        rows = constrain(_rows(hidden, index, spec.chunk), BATCH, spec.layout)
        scores = _scores(rows, head, spec.order)
        value, entropy, slope = _chunk_values(spec, scores, _rows(targets, index, spec.chunk))
        if pulls is not None:
            pull = _head_transpose(slope, head, rows.dtype, spec.order)
            pulls = _put(pulls, pull, index)
        return _put(logprobs, value, index), _put(spread, entropy, index), pulls

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    pulls = jnp.zeros(hidden.shape, jnp.float32) if slopes == "keep" else None
    return jax.lax.fori_loop(0, num_chunks, step, (zeros, zeros, pulls))


def _values(
    spec: _Head, hidden: Array, head: Array, targets: Array, num_chunks: Array
) -> tuple[Array, Array]:
    """Log-probs and entropies [N] of rows whose real ones come first."""
    return _forward_chunks(spec, hidden, head, targets, num_chunks, slopes="drop")[:2]


def _packed_fwd(spec: _Head, hidden: Any, head: Any, targets: Any, num_chunks: Any) -> Any:
    trained = any(leaf.perturbed for leaf in jax.tree.leaves(head, is_leaf=_is_primal))
    hidden, head, targets, num_chunks = jax.tree.map(
        lambda leaf: leaf.value, (hidden, head, targets, num_chunks), is_leaf=_is_primal
    )
    if trained:
        out = _forward_chunks(spec, hidden, head, targets, num_chunks, slopes="drop")[:2]
        return out, (hidden, head, targets, num_chunks)
    *out, pulls = _forward_chunks(spec, hidden, head, targets, num_chunks, slopes="keep")
    return tuple(out), jnp.asarray(pulls, hidden.dtype)


def _is_primal(node: Any) -> bool:
    return isinstance(node, CustomVJPPrimal)


def _packed_bwd(spec: _Head, saved: Any, cotangents: Any) -> Any:
    slope, _ = cotangents  # entropy carries no gradient
    if isinstance(slope, SymbolicZero):
        return None, None, None, None
    if not isinstance(saved, tuple):
        grad = slope[:, None] * saved.astype(jnp.float32)
        return grad.astype(saved.dtype), None, None, None
    hidden, head, targets, num_chunks = saved
    grad, head_grad = _backward_chunks(spec, hidden, head, targets, num_chunks, slope)
    return grad, head_grad, None, None


def _backward_chunks(
    spec: _Head, hidden: Array, head: Array, targets: Array, num_chunks: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Gradients to hidden [N, D] and head [V, D], from logits recomputed chunk by chunk."""

    def step(index: Array, carry: Any) -> Any:
        grad, head_grad = carry
        rows = constrain(_rows(hidden, index, spec.chunk), BATCH, spec.layout)
        scores = _scores(rows, head, spec.order)
        _, _, slope = _chunk_values(spec, scores, _rows(targets, index, spec.chunk))
        slope = slope * _rows(cotangent, index, spec.chunk)[:, None]
        grad = _put(grad, _head_transpose(slope, head, rows.dtype, spec.order), index)
        return grad, head_grad + _outer(slope, rows, head.dtype)

    start = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32))
    grad, head_grad = jax.lax.fori_loop(0, num_chunks, step, start)
    return grad.astype(hidden.dtype), head_grad.astype(head.dtype)


_packed_logprobs = jax.custom_vjp(_values, nondiff_argnums=(0,))
_packed_logprobs.defvjp(_packed_fwd, _packed_bwd, symbolic_zeros=True)


def score(
    fused: PyTree,
    tokens: Array,
    token_mask: Array,
    *,
    prompt_width: int,
    group_size: int,
    config: ModelConfig,
    side: Side,
    temperature: float,
    chunk: int = 128,
    entropy: Entropy = "on",
    key: Array | None = None,
    guidance: PyTree = None,
    stats: Stats = "off",
    remat: Remat = "none",
    trainable_from: int = 0,
    watch: Watch = "off",
    candidates: Array | None = None,
) -> Scores:
    """Teacher-forced log-probabilities of a batch's completions, differentiable.

    Each prompt runs once for its whole group; the head runs on real completion tokens only.

    Args:
        fused: as in `forward`.
        tokens: [B, T] int32 in the layout of `batch.py`. token_mask: [B, T] bool.
        prompt_width: columns of the (left-padded) prompts; at least 1.
        group_size: rows that share a prompt.
        temperature: the sampling temperature, > 0.
        chunk: rows whose logits exist at a time.
        entropy: "on" also gives the entropies.
        guidance: {name: leaves [B, T, L, ...]} in the layout of the batch, or None: what the rollout
            recorded, given to the layers as their hints.
        candidates: [B, T, k] int32, further tokens to score at every completion column, or None.
        The rest is as in `forward`.

    Returns:
        Scores, [B, T].

    Exact: with `order="fixed"` equal to what the sampler recorded, bit for bit.
    """
    tokens, token_mask = jnp.asarray(tokens), jnp.asarray(token_mask)
    chex.assert_equal_shape([tokens, token_mask])
    if not 1 <= prompt_width < tokens.shape[1]:
        raise ValueError(f"prompt_width must be in 1..{tokens.shape[1] - 1}, got {prompt_width}")
    completions, mask = tokens[:, prompt_width:], token_mask[:, prompt_width:]
    fused = in_use(fused, config, side, reads="once")
    out = forward_groups(
        fused,
        tokens[::group_size, :prompt_width],
        completions[:, :-1],
        prompt_mask=token_mask[::group_size, :prompt_width],
        completion_mask=mask[:, :-1],
        config=config,
        side=side,
        key=key,
        hint=pack_hint(guidance or {}, prompt_width=prompt_width, group_size=group_size),
        stats=stats,
        remat=remat,
        trainable_from=trainable_from,
        watch=watch,
    )
    before = jnp.repeat(out.prompt_hidden, group_size, axis=0)[:, None]  # [B, 1, D]
    hidden = jnp.concatenate([before, out.hidden], axis=1).reshape(-1, config.d_model)
    asked = None if candidates is None else candidates[:, prompt_width:].reshape(mask.size, -1)
    values, spread, further = _scored(
        fused, hidden, completions.reshape(-1), mask.reshape(-1), asked,
        temperature=temperature, chunk=chunk, side=side, entropy=entropy,
    )  # fmt: skip
    found = Scores(logprobs=values, entropy=spread, stats=out.stats, watched=out.watched, candidates=further)
    return _placed(found, completions.shape, before=prompt_width)


def _scored(
    fused: PyTree, hidden: Array, targets: Array, mask: Array, asked: Array | None, *,
    temperature: float, chunk: int, side: Side, entropy: Entropy,
) -> tuple[Array, Array | None, Array | None]:  # fmt: skip
    """Log-probs and entropies of targets [M], and log-probs of the further tokens asked for, [M, k]."""
    values, spread = token_logprobs(
        fused, hidden, targets,
        temperature=temperature, mask=mask, chunk=chunk, order=side.order, entropy=entropy,
        layout=side.layout,
    )  # fmt: skip
    if asked is None:
        return values, spread, None
    further = candidate_logprobs(fused, hidden, targets, values, asked, temperature=temperature, chunk=chunk)
    return values, spread, jnp.where(mask[:, None], further, 0.0)


def _placed(flat: Scores, shape: tuple[int, ...], *, before: int) -> Scores:
    """Scores of [M] or [M, k] tokens in a batch's layout: [B, before + T], zeros in the first columns."""

    def place(x: Array | None) -> Array | None:
        if x is None:
            return None
        pad = ((0, 0), (before, 0), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x.reshape(*shape, *x.shape[1:]), pad)

    logprobs = place(flat.logprobs)
    assert logprobs is not None  # never left out
    return dataclasses.replace(
        flat, logprobs=logprobs, entropy=place(flat.entropy), candidates=place(flat.candidates)
    )


def segment_positions(segments: Array) -> Array:
    """[B, T] int32: each column's place within its own run of equal segment numbers."""
    columns = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return columns - jax.lax.cummax(jnp.where(begins, columns, 0), axis=1)


def score_packed(
    fused: PyTree,
    tokens: Array,
    segments: Array,
    wanted: Array,
    *,
    config: ModelConfig,
    side: Side,
    temperature: float,
    chunk: int = 128,
    key: Array | None = None,
    guidance: PyTree = None,
    stats: Stats = "off",
    remat: Remat = "none",
    trainable_from: int = 0,
    watch: Watch = "off",
) -> Scores:
    """Log-probabilities of rows that hold several examples, each seen by its own tokens alone.

    Args:
        fused: as in `forward`.
        tokens: [B, T] int32. segments: [B, T] int32, see `TrainBatch`.
        wanted: [B, T] bool, the tokens to score; the first of an example has nothing before it and
            cannot be one of them.
        guidance: {name: leaves [B, T, L, ...]} by column of these rows, or None.
        The rest is as in `score`.

    Returns:
        Scores, [B, T]; 0 where nothing is wanted.
    """
    chex.assert_equal_shape([tokens, segments, wanted])
    before = segments[:, :-1]
    fused = in_use(fused, config, side, reads="once")
    out = forward(
        fused,
        tokens[:, :-1],
        config=config,
        side=side,
        positions=segment_positions(before),
        token_mask=before > 0,
        segments=before,
        key=key,
        hint=packed_hint(guidance or {}),
        stats=stats,
        remat=remat,
        trainable_from=trainable_from,
        watch=watch,
    )
    known = wanted[:, 1:] & (segments[:, 1:] == before) & (before > 0)
    values, spread = token_logprobs(
        fused,
        out.hidden.reshape(-1, config.d_model),
        tokens[:, 1:].reshape(-1),
        temperature=temperature,
        mask=known.reshape(-1),
        chunk=chunk,
        order=side.order,
        entropy="on",
        layout=side.layout,
    )
    found = Scores(logprobs=values, entropy=spread, stats=out.stats, watched=out.watched)
    return _placed(found, before.shape, before=1)
