"""The synchronous loop: publish, collect, learn, record; it owns the order and nothing else.

Every random key is folded in from the run's root key by step, so that a resumed run needs no
key but that one, and a step is the same whatever came before it in the process.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.loop import record
from fp4rl_jax.loop.collect import Collected, Collector, collect
from fp4rl_jax.parallel import put_whole
from fp4rl_jax.trainer import Learner, Outcome, TrainState, device_bytes, place, score_batch, update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step is made of; every field is a plain value or a function.

    Attributes:
        learner: the learning side.
        collector: prompts to scored rollouts.
        publish: (state) -> published rollout parameters of the state's version.
        prepare: the algorithm's, (rollouts, rewards, ref_logprobs or None) -> TrainBatch.
        clipped: the correction's, (log_ratio, loss_mask) -> [B, T] bool.
        reference: (rollouts) -> ref_logprobs [B, T], or None where no term needs them.
        observe: (published, rollouts) -> what was seen of the rollout's activations, and its metrics;
            None where no recipe asks.
        renew: (calibration, seen) -> the calibration of the next version.
        base: the trainer's `backbone`.
        key: root key of the run.
    """

    learner: Learner
    collector: Collector
    publish: Callable[[TrainState], Any]
    prepare: Callable[[Rollouts, Array, Array | None], TrainBatch]
    clipped: Callable[[Array, Array], Array]
    reference: Callable[[Rollouts], Array] | None
    base: PyTree
    key: Array
    observe: Callable[[Any, Rollouts], tuple[PyTree, record.Row]] | None = None
    renew: Callable[[PyTree, PyTree], PyTree] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What one step leaves behind.

    Attributes:
        row: its metrics, by key.
        collected: its rollouts; None where a step samples none.
        trainer_logprobs: [B, T] float32, at the rollout's version.
        problems: a line for every skipped update.
    """

    row: record.Row
    collected: Collected | None
    trainer_logprobs: np.ndarray
    problems: tuple[str, ...]


#: Folded into a step's key for its updates; sampling rounds fold in 0, 1, ... below max_rounds.
UPDATE_KEY = 2**31 - 1

_update = jax.jit(update, static_argnames="learner", donate_argnums=0)
#: On a mesh the batch is donated, too; on one device jax would warn that its integers fit no output.
_update_on_mesh = jax.jit(update, static_argnames="learner", donate_argnums=(0, 1))
_score = jax.jit(score_batch, static_argnames="learner")


def train_step(state: TrainState, number: int, parts: Parts) -> tuple[TrainState, Step]:
    """Runs step `number`: publish, collect, learn.

    Args:
        state: the trainer's state; it is donated.
        number: the step, from 0.
        parts: everything else.

    Returns:
        The next state, and what the step leaves behind.
    """
    clock = _Clock()
    published = jax.block_until_ready(parts.publish(state))
    clock.lap("publish")
    collected = collect(published, jax.random.fold_in(parts.key, number), parts.collector)
    clock.lap("rollout")
    seen_row: record.Row = {}
    if parts.observe is not None:
        seen, seen_row = parts.observe(published, collected.rollouts)
        if parts.renew is not None:
            state = dataclasses.replace(state, calibration=parts.renew(state.calibration, seen))
        clock.lap("observe")
    reference = None
    if parts.reference is not None:
        reference = jax.block_until_ready(parts.reference(collected.rollouts))
        clock.lap("reference")
    batch = parts.prepare(collected.rollouts, jnp.asarray(collected.rewards), reference)
    age = int(state.params_version) - int(collected.rollouts.params_version)
    update_key = jax.random.fold_in(jax.random.fold_in(parts.key, number), UPDATE_KEY)
    state, learned = learn(state, batch, parts.base, learner=parts.learner, key=update_key)
    clock.lap("update")
    row = record.rollout_row(collected) | record.update_row(learned.outcomes)
    row |= record.mismatch_row(batch, learned.old_logprobs, clipped=parts.clipped)
    row |= record.flatten_sums({"weights": published.stats}, "quant/")
    row |= seen_row
    row |= clock.row(collected.sampled_tokens)
    if collected.rollouts.guidance:
        row["guidance_age"] = float(age)
        settings = parts.learner.config, parts.learner.side.layout
        row["guidance_device_bytes"] = float(device_bytes(collected.rollouts.guidance, *settings))
    row["params_version"] = float(int(collected.rollouts.params_version))
    problems = tuple(_problems(number, learned.outcomes, collected))
    for line in problems:
        logging.warning("%s", line)
    return state, Step(row=row, collected=collected, trainer_logprobs=learned.old_logprobs, problems=problems)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What the updates of one rollout batch report.

    Attributes:
        outcomes: one an update, on the host.
        old_logprobs: [B, T] float32, the trainer's at the rollout's version.
    """

    outcomes: tuple[Outcome, ...]
    old_logprobs: np.ndarray


def learn(
    state: TrainState, batch: TrainBatch, base: PyTree, *, learner: Learner, key: Array
) -> tuple[TrainState, Learned]:
    """Makes the updates of one rollout batch, each on its own share of the groups.

    With one update the trainer's old log-probs are the current ones and the ratio is exactly 1;
    with more, the later shares are scored before the first update moves the parameters. A side that
    rounds at random gets a key an update, folded in from `key`.
    """
    first, *later = _shares(batch, learner.config.updates_per_rollout)
    config, layout = learner.config, learner.side.layout

    def scored(share: TrainBatch) -> TrainBatch:
        placed, held = place(share, config, layout)
        return dataclasses.replace(share, old_logprobs=_score(state, placed, base, held, learner=learner))

    later = [scored(share) for share in later]
    outcomes = []
    for index, share in enumerate([first, *later]):
        own = jax.random.fold_in(key, index) if learner.side.specs.is_stochastic else None
        state, outcome = make_update(state, share, base, learner=learner, key=own)
        outcomes.append(outcome)
    old = [outcomes[0].trainer_logprobs, *(share.old_logprobs for share in later)]
    learned = Learned(outcomes=tuple(outcomes), old_logprobs=np.concatenate([np.asarray(x) for x in old]))
    return dataclasses.replace(state, params_version=state.params_version + 1), learned


def make_update(
    state: TrainState, batch: TrainBatch, base: PyTree, *, learner: Learner, key: Array | None
) -> tuple[TrainState, Outcome]:
    """One update from a host batch, on one device or on the learner's mesh; `state` is donated.

    Returns:
        The next state, and the outcome on the host.
    """
    layout = learner.side.layout
    step = _update if layout is None else _update_on_mesh
    (placed, held), key = place(batch, learner.config, layout), put_whole(key, layout)
    state, outcome = step(state, placed, base, held, learner=learner, key=key)
    return state, jax.device_get(outcome)


def compile_updates(state: TrainState, batch: TrainBatch, base: PyTree, *, learner: Learner) -> None:
    """Compiles the programs that `learn` runs on one device for arguments of these shapes; runs none.

    Args:
        state, base: of abstract arrays (ShapeDtypeStruct).
        batch: as the algorithm's `prepare` makes it.
        learner: the learning side.
    """
    key = jax.random.key(0) if learner.side.specs.is_stochastic else None
    first, *later = _shares(batch, learner.config.updates_per_rollout)
    shares = [first]
    if later:
        placed, held = place(later[0], learner.config, None)
        scores = _score.lower(state, placed, base, held, learner=learner)
        scores.compile()
        old = jnp.zeros(scores.out_info.shape, scores.out_info.dtype)
        shares.append(dataclasses.replace(later[0], old_logprobs=old))
    for share in shares:
        placed, held = place(share, learner.config, None)
        _update.lower(state, placed, base, held, learner=learner, key=key).compile()


def _shares(batch: TrainBatch, count: int) -> list[TrainBatch]:
    if count == 1:
        return [batch]
    rows = batch.tokens.shape[0] // count
    return [jax.tree.map(lambda x, i=i: x[i * rows : (i + 1) * rows], batch) for i in range(count)]


def _problems(number: int, outcomes: Sequence[Outcome], collected: Collected) -> list[str]:
    lines = []
    rows_before = 0
    for outcome in outcomes:
        rows = np.flatnonzero(~outcome.finite_rows) + rows_before
        rows_before += len(outcome.finite_rows)
        if bool(outcome.applied):
            continue
        leaves = [path for path, finite in outcome.finite_leaves.items() if not bool(finite)]
        prompts = sorted({collected.items[r // collected.rollouts.group_size].key for r in rows})
        lines.append(
            f"step {number}: update skipped, loss {float(outcome.loss)}; non-finite gradient in "
            f"{', '.join(leaves) or 'no leaf'}; prompts {', '.join(map(str, prompts)) or 'none alone'}"
        )
    return lines


class _Clock:
    """Wall-clock seconds by phase; the only metrics that a resumed run does not repeat."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] = now - self._last
        self._last = now

    def row(self, sampled_tokens: int) -> record.Row:
        row = {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
        row["step_seconds"] = sum(self._seconds.values())
        row["tokens_per_second"] = sampled_tokens / self._seconds["rollout"]
        return row
