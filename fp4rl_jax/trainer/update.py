"""One update: gradients over microbatches, one division by the denominator, one guarded step.

`update` is pure and takes its whole static surroundings as one frozen `Learner`, so that the
synchronous and the asynchronous loop, the tests and the benchmarks jit the same function.
"""

import dataclasses
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct

from fp4rl_jax import models
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.models import logprobs
from fp4rl_jax.objectives.means import Sums, summed
from fp4rl_jax.objectives.triage import TriageConfig
from fp4rl_jax.ops import Stats
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.parallel import constrain, constrain_rows, constrain_whole
from fp4rl_jax.trainer import terms
from fp4rl_jax.trainer.backbone import backbone, with_backbone
from fp4rl_jax.trainer.config import TrainerConfig
from fp4rl_jax.trainer.optim import optimizer, schedule
from fp4rl_jax.trainer.state import TrainState
from fp4rl_jax.trainer.stream import over_microbatches
from fp4rl_jax.trainer.subset import Flat, Subset, merge


class LossFn(Protocol):
    """An algorithm's `loss` with its config bound: see `algorithms`."""

    def __call__(self, trainer_logprobs: Array, batch: TrainBatch, weights: Array, /) -> Any: ...


class WeightsFn(Protocol):
    """A correction's `weights` with its config bound: see `corrections`."""

    def __call__(self, log_ratio: Array, loss_mask: Array, /) -> Array: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """Everything static about the learning side; hashable, the static argument of `update`.

    Attributes:
        model, side, config, subset: the model, its numerics, the trainer's settings, what trains.
        loss, weights: the algorithm's loss and the correction's weights, as frozen callables.
        temperature: the sampling temperature that log-probs are taken at.
        triage: the Gate on the loss and the Repair term, both off by default.
        stats: which activations' quantization an update counts; see `ops.stats`.
        balance_coef: weight of a mixture's load-balance loss.
    """

    model: models.ModelConfig
    side: Side
    config: TrainerConfig
    subset: Subset
    loss: LossFn
    weights: WeightsFn
    temperature: float = 1.0
    triage: TriageConfig = TriageConfig()
    stats: Stats = "off"
    balance_coef: float = 0.0

    @property
    def adds_terms(self) -> bool:
        """Whether a term with a denominator of its own joins the algorithm's loss."""
        return self.triage.repair.scope != "off" or self.balance_coef > 0


@struct.dataclass
class Outcome:
    """What an update reports.

    Attributes:
        loss: [] float32.
        grad_norm: [] float32, before clipping.
        lr: [] float32, of this update.
        trainer_logprobs: [B, T] float32, nats, with the parameters before the update.
        entropy: Sums of the policy's entropy over the loss mask, nats.
        metrics: the algorithm's and TRIAGE's, by name, as Sums.
        stats: quantization statistics {site: {operand: {name: Sums}}} over layers and microbatches.
        applied: [] bool, False where the update was skipped as non-finite.
        finite_rows: [B] bool, log-probs and the gradient of the row's microbatch are finite; of all
            microbatches where one gradient goes through them (`triage.gate.microbatches`).
        finite_leaves: by path, [] bool, the gradient leaf is finite.
    """

    loss: Array
    grad_norm: Array
    lr: Array
    trainer_logprobs: Array
    entropy: Sums
    metrics: dict[str, Sums]
    stats: PyTree
    applied: Array
    finite_rows: Array
    finite_leaves: dict[str, Array]


def update(
    state: TrainState,
    batch: TrainBatch,
    base: PyTree | None = None,
    held: PyTree = None,
    *,
    learner: Learner,
    key: Array | None = None,
) -> tuple[TrainState, Outcome]:
    """Makes one optimizer update from one batch.

    A non-finite loss or gradient leaves masters and moments untouched, counts in `skipped`, and is
    located in the outcome; it never reaches the state.

    Args:
        state: the trainer's state; safe to donate.
        batch: [B, T] arrays as `TrainBatch` says.
        base: `backbone(state.frozen, ...)`; made here where it is not given.
        held: the batch's guidance where it waits in host memory, as `stream.place` leaves it, or None.
        learner: the static surroundings.
        key: typed PRNG key of this update, for a side that rounds gradients at random; other sides
            leave it unused.

    Returns:
        The next state and the outcome.
    """
    base = _backbone(state, learner) if base is None else base
    shares = _microbatches(batch, learner)
    grads, parts = _accumulate(state, base, shares, held, learner, key=key)
    count = _divisor(jnp.sum(parts.count))
    grads = jax.tree.map(lambda g: g / count, grads)
    loss = jnp.sum(parts.total) / count
    metrics = summed(parts.metrics | {"entropy": parts.entropy})
    finite_leaves = {path: jnp.all(jnp.isfinite(g)) for path, g in grads.items()}
    applied = jnp.isfinite(loss) & jnp.all(jnp.stack(list(finite_leaves.values())))
    rows = batch.tokens.shape[0]
    per_share = jnp.repeat(parts.finite_grads, rows // parts.finite_grads.shape[0])
    outcome = Outcome(
        loss=metrics["loss"].mean(),
        grad_norm=optax.tree.norm(grads),
        lr=jnp.asarray(schedule(learner.config.optim)(state.updates), jnp.float32),
        trainer_logprobs=parts.logprobs.reshape(batch.tokens.shape),
        entropy=metrics.pop("entropy"),
        metrics=metrics,
        stats=jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), parts.stats),
        applied=applied,
        finite_rows=per_share & jnp.all(jnp.isfinite(parts.logprobs.reshape(batch.tokens.shape)), axis=-1),
        finite_leaves=finite_leaves,
    )
    layout = learner.side.layout
    after = models.constrain_params(_apply(state, grads, applied, learner), learner.model, layout)
    return after, constrain_whole(outcome, layout)


def score_batch(
    state: TrainState,
    batch: TrainBatch | Rollouts,
    base: PyTree | None = None,
    held: PyTree = None,
    *,
    learner: Learner,
) -> Array:
    """The trainer's log-probs [B, T] of a batch, in the update's own microbatch geometry; see `update`."""
    base = _backbone(state, learner) if base is None else base
    fused = with_backbone(models.fuse(state.params), base)
    asked = TrainBatch(
        tokens=batch.tokens,
        token_mask=batch.token_mask,
        loss_mask=batch.loss_mask,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=jnp.zeros(batch.tokens.shape[0]),
        guidance=batch.guidance,
        prompt_width=batch.prompt_width,
        group_size=batch.group_size,
    )
    shares = _microbatches(asked, learner)
    _, found = over_microbatches(
        lambda _, share, __: (None, _score(fused, share, learner).logprobs),
        None, shares, held, layout=learner.side.layout,
    )  # fmt: skip
    return constrain_whole(found.reshape(batch.tokens.shape), learner.side.layout)


@struct.dataclass
class _Parts:
    """Per microbatch ([M] leading): loss sum and count, log-probs, sums of all kinds, finiteness."""

    total: Array
    count: Array
    logprobs: Array
    entropy: Sums
    metrics: dict[str, Sums]
    stats: PyTree
    finite_grads: Array


def _microbatches(batch: TrainBatch, learner: Learner) -> TrainBatch:
    """Reshapes every [B, ...] leaf to [M, rows, ...]; a share of a group is a group of its own.

    On a mesh the rows of every microbatch are shared out, so that no device waits for its turn.
    """
    num_rows, layout = batch.tokens.shape[0], learner.side.layout
    if learner.config.guidance_memory == "host" and batch.guidance:
        raise ValueError('guidance_memory = "host": expected a batch from `stream.place`, got its guidance')
    rows = learner.config.microbatch_rows or num_rows
    if num_rows % rows:
        raise ValueError(f"microbatch_rows = {rows} does not divide the batch of {num_rows} rows")
    batch = constrain_rows(batch, layout)
    shares = jax.tree.map(lambda x: x.reshape(num_rows // rows, rows, *x.shape[1:]), batch)
    shares = jax.tree.map(lambda x: constrain(x, (None, "batch"), layout), shares)
    return dataclasses.replace(shares, group_size=min(batch.group_size, rows))


def _score(
    fused: Any, share: TrainBatch, learner: Learner, *, stats: Stats = "off", key: Array | None = None
) -> logprobs.Scores:
    common: dict[str, Any] = {
        "config": learner.model,
        "side": learner.side,
        "temperature": learner.temperature,
        "chunk": learner.config.logprob_chunk,
        "remat": learner.config.remat,
        "trainable_from": learner.subset.first_layer,
        "key": key,
        "stats": stats,
        "watch": "all" if learner.model.num_experts else "off",
    }
    if share.segments is not None:
        return logprobs.score_packed(
            fused, share.tokens, share.segments, share.loss_mask, guidance=share.guidance, **common
        )
    return logprobs.score(
        fused,
        share.tokens,
        share.token_mask,
        prompt_width=share.prompt_width,
        group_size=share.group_size,
        guidance=share.guidance,
        candidates=share.candidates,
        **common,
    )


def _backbone(state: TrainState, learner: Learner) -> PyTree:
    return backbone(state.frozen, model=learner.model, side=learner.side)


def _divisor(count: Array) -> Array:
    """1 where there is no term; a sum of weights below 1 stays as it is."""
    return jnp.where(count > 0, count, 1.0)


def _denominators(shares: TrainBatch, learner: Learner) -> terms.Denominators:
    """Those of the whole update, from the stacked microbatches; see `terms`."""
    parts = shares.tokens.shape[0]
    segments = terms.num_segments(shares, learner.triage)
    if not learner.adds_terms or parts == 1:
        return terms.Denominators(loss=None, segments=segments, microbatches=parts)

    def count(share: TrainBatch) -> Array:
        blank = jnp.zeros(share.tokens.shape, jnp.float32)
        return learner.loss(blank, share, blank).count.astype(jnp.float32)

    total = jnp.sum(jax.lax.map(count, shares))
    return terms.Denominators(loss=total, segments=segments, microbatches=parts)


def _waits_for_weights(shares: TrainBatch, learner: Learner) -> bool:
    """Whether no microbatch's gradient can be taken before the log-probs of all are known; see `terms`."""
    return learner.adds_terms and learner.triage.counts_weights and shares.tokens.shape[0] > 1


def _accumulate(
    state: TrainState, base: PyTree, shares: TrainBatch, held: PyTree, learner: Learner, *, key: Array | None
) -> tuple[Flat, _Parts]:
    """Sums the gradients of the loss sums over microbatches; each has a key of its own."""
    state, base = (
        dataclasses.replace(state, frozen=jax.lax.stop_gradient(state.frozen)),
        jax.lax.stop_gradient(base),
    )
    keys = None if key is None else jax.random.split(key, shares.tokens.shape[0])
    if not _waits_for_weights(shares, learner):
        return _one_by_one(state, base, shares, held, keys, learner)
    if learner.triage.gate.microbatches == "score_twice":
        fused = with_backbone(models.fuse(state.params), base)
        return _one_by_one(state, base, _weighted(shares, held, fused, learner), held, keys, learner)
    if held is not None:
        raise ValueError('triage.gate.microbatches = "keep_inputs": expected guidance on the device')
    return _all_at_once(state, base, shares, keys, learner)


def _weighted(shares: TrainBatch, held: PyTree, fused: Any, learner: Learner) -> TrainBatch:
    """Attaches the Gate's weights to every microbatch, from a scoring of its own."""

    def weigh(_: None, share: TrainBatch, __: None) -> tuple[None, Any]:
        return None, terms.gated(share, _score(fused, share, learner).logprobs, learner.triage).weighting

    _, weighting = over_microbatches(weigh, None, shares, held, layout=learner.side.layout)
    return dataclasses.replace(shares, weighting=weighting)


def _one_by_one(
    state: TrainState, base: PyTree, shares: TrainBatch, held: PyTree, keys: Array | None, learner: Learner
) -> tuple[Flat, _Parts]:
    """A gradient a microbatch, in order: one microbatch's activations exist at a time."""
    denominators = _denominators(shares, learner)

    def loss_sum(trainable: Flat, share: TrainBatch, key: Array | None) -> tuple[Array, _Parts]:
        fused = with_backbone(models.fuse(merge(trainable, state.frozen)), base)
        scores = _score(fused, share, learner, stats=learner.stats, key=key)
        return _loss(scores, share, learner, denominators)

    def step(grads: Flat, share: TrainBatch, key: Array | None) -> tuple[Flat, _Parts]:
        (_, parts), new = jax.value_and_grad(loss_sum, has_aux=True)(state.trainable, share, key)
        grads = {path: grads[path] + new[path].astype(jnp.float32) for path in grads}
        grads = models.constrain_params(grads, learner.model, learner.side.layout)
        return grads, dataclasses.replace(parts, finite_grads=_all_finite(new))

    zeros = {path: jnp.zeros(x.shape, jnp.float32) for path, x in state.trainable.items()}
    return over_microbatches(step, zeros, shares, held, keys, layout=learner.side.layout)


def _all_at_once(
    state: TrainState, base: PyTree, shares: TrainBatch, keys: Array | None, learner: Learner
) -> tuple[Flat, _Parts]:
    """One gradient through all forwards, whose layers' inputs are kept; sums over microbatches in float32."""

    def loss_sum(trainable: Flat) -> tuple[Array, _Parts]:
        def score(_: None, share: TrainBatch, key: Array | None) -> tuple[None, logprobs.Scores]:
            # rounded here, so that the cotangents of microbatches are added before it, in float32
            own = {path: leaf.astype(state.trainable[path].dtype) for path, leaf in trainable.items()}
            fused = with_backbone(models.fuse(merge(own, state.frozen)), base)
            return None, _score(fused, share, learner, stats=learner.stats, key=key)

        _, scores = over_microbatches(score, None, shares, None, keys, layout=learner.side.layout)
        still = jax.lax.stop_gradient(scores.logprobs)
        weighted = jax.vmap(lambda share, found: terms.gated(share, found, learner.triage))(shares, still)
        denominators = _denominators(weighted, learner)
        totals, parts = jax.lax.map(
            lambda each: _loss(each[0], each[1], learner, denominators), (scores, weighted)
        )
        return jnp.sum(totals), parts

    wide = {path: leaf.astype(jnp.float32) for path, leaf in state.trainable.items()}
    grads, parts = jax.grad(loss_sum, has_aux=True)(wide)
    grads = models.constrain_params(grads, learner.model, learner.side.layout)
    finite = jnp.broadcast_to(_all_finite(grads), parts.finite_grads.shape)
    return grads, dataclasses.replace(parts, finite_grads=finite)


def _all_finite(grads: Flat) -> Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads.values()]))


def _loss(
    scores: logprobs.Scores, share: TrainBatch, learner: Learner, denominators: terms.Denominators
) -> tuple[Array, _Parts]:
    assert scores.entropy is not None  # asked for
    chex.assert_equal_shape([scores.logprobs, scores.entropy, share.loss_mask])
    current = jax.lax.stop_gradient(scores.logprobs)
    old = current if share.old_logprobs is None else share.old_logprobs
    log_ratio = jnp.where(share.loss_mask, old - share.rollout_logprobs, 0.0)
    weights = jax.lax.stop_gradient(learner.weights(log_ratio, share.loss_mask))
    share = terms.centered(terms.gated(share, current, learner.triage), scores.candidates)
    found = learner.loss(scores.logprobs, share, weights)
    extra, extra_metrics = terms.added(share, scores.logprobs, learner.triage, denominators)
    if scores.watched is not None:
        balance, seen = terms.mixture(scores.watched, learner.model.num_active)
        extra = extra + learner.balance_coef * balance / denominators.microbatches
        extra_metrics |= seen
    count = found.count.astype(jnp.float32)
    total = found.sum + extra * (count if denominators.loss is None else denominators.loss)
    parts = _Parts(
        total=total,
        count=count,
        logprobs=current,
        entropy=Sums(
            total=jnp.sum(jnp.where(share.loss_mask, jax.lax.stop_gradient(scores.entropy), 0.0)),
            count=jnp.sum(share.loss_mask, dtype=jnp.int32),
        ),
        metrics=found.metrics | extra_metrics,
        stats=scores.stats,
        finite_grads=jnp.array(True),
    )
    return total, parts


def _apply(state: TrainState, grads: Flat, applied: Array, learner: Learner) -> TrainState:
    """The optimizer's step where `applied`, the untouched state where not.

    It is taken in float32, whatever the masters' dtype, to which masters and moments are then rounded.
    """

    def good(current: TrainState) -> TrainState:
        changes, opt_state = optimizer(learner.config.optim).update(
            grads, current.opt_state, current.trainable
        )
        trainable = optax.apply_updates(current.trainable, changes)
        opt_state = jax.tree.map(lambda new, old: new.astype(old.dtype), opt_state, current.opt_state)
        return dataclasses.replace(
            current,
            trainable=trainable,
            opt_state=opt_state,
            updates=current.updates + 1,
            skipped=jnp.zeros_like(current.skipped),
        )

    def bad(current: TrainState) -> TrainState:
        return dataclasses.replace(
            current, skipped=current.skipped + 1, skipped_total=current.skipped_total + 1
        )

    return jax.lax.cond(applied, good, bad, state)
