"""The supervised step: examples to one update of the same trainer, with the likelihood as its loss."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.algorithms import Loss
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.data import Examples
from fp4rl_jax.loop import record
from fp4rl_jax.loop.sync import Step, make_update
from fp4rl_jax.objectives.means import masked_sum
from fp4rl_jax.trainer import Learner, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedParts:
    """What a supervised step is made of.

    Attributes:
        learner: the learning side; its loss is `negative_log_likelihood`.
        draw: the next examples, in data order; moves the data position.
        prompt_width: columns of the prompts.
        base: the trainer's `backbone`.
        key: root key of the run; a side that rounds at random gets a key an update, folded in from it.
    """

    learner: Learner
    draw: Callable[[], Examples]
    prompt_width: int
    base: PyTree
    key: Array


def negative_log_likelihood(
    trainer_logprobs: Array, batch: TrainBatch, weights: Array, config: Any = None
) -> Loss:
    """-log pi of the completions' tokens, mean over all of them, nats/token; prompts carry no loss."""
    del weights, config
    sums = masked_sum(-trainer_logprobs, batch.loss_mask)
    return Loss(sum=sums.total, count=sums.count, metrics=jax.lax.stop_gradient({"loss": sums}))


def batch_of(examples: Examples, *, prompt_width: int) -> TrainBatch:
    """Examples as the trainer takes them: advantage 1, no rollout; packed rows have no prompt columns."""
    return TrainBatch(
        tokens=jnp.asarray(examples.tokens),
        token_mask=jnp.asarray(examples.token_mask),
        loss_mask=jnp.asarray(examples.loss_mask),
        rollout_logprobs=jnp.zeros(examples.tokens.shape, jnp.float32),
        advantages=jnp.ones(examples.tokens.shape[0], jnp.float32),
        segments=None if examples.segments is None else jnp.asarray(examples.segments),
        prompt_width=prompt_width if examples.segments is None else 0,
        group_size=1,
    )


def supervised_step(state: TrainState, number: int, parts: SupervisedParts) -> tuple[TrainState, Step]:
    """Makes update `number` from the next examples; `state` is donated."""
    started = time.perf_counter()
    examples = parts.draw()
    batch = batch_of(examples, prompt_width=parts.prompt_width)
    key = jax.random.fold_in(parts.key, number) if parts.learner.side.specs.is_stochastic else None
    state, outcome = make_update(state, batch, parts.base, learner=parts.learner, key=key)
    row = record.update_row([outcome])
    row["trained_examples"] = float(examples.count)
    row["trained_tokens"] = float(examples.loss_mask.sum())
    row["padding_share"] = float(1.0 - examples.token_mask.mean())
    row["update_seconds"] = row["step_seconds"] = time.perf_counter() - started
    problems = (
        () if bool(outcome.applied) else (f"step {number}: update skipped, loss {float(outcome.loss)}",)
    )
    state = dataclasses.replace(state, params_version=state.params_version + 1)
    logprobs = np.asarray(outcome.trainer_logprobs)
    return state, Step(row=row, collected=None, trainer_logprobs=logprobs, problems=problems)
