"""Guidance that waits in host memory gives the update that guidance on the device gives, bit for bit."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.algorithms import grpo
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.corrections import tis
from fp4rl_jax.loop import Bound
from fp4rl_jax.objectives.triage import GateConfig, RepairConfig, TriageConfig
from fp4rl_jax.parallel.memory import HOST, require_host_memory
from fp4rl_jax.trainer import (
    Learner,
    OptimConfig,
    TrainerConfig,
    device_bytes,
    init_state,
    place,
    plan,
    score_batch,
    update,
)
from tests.models import guidance_test as planting
from tests.models.helpers import ragged_batch

MODEL = dataclasses.replace(planting.DENSE, num_layers=2)
ROWS, WIDTH, NEW = planting.ROWS, planting.WIDTH, planting.NEW
TRAINER, ROLLOUT = (dataclasses.replace(side, order="free") for side in planting.sides(MODEL, depth=1.0))
OFF = TriageConfig()
BOTH = TriageConfig(
    gate=GateConfig(scope="q3", segment=2, mild=-0.1, microbatches="score_twice"),
    repair=RepairConfig(scope="adv_positive", segment=2),
)


def batch(rng: np.random.Generator) -> TrainBatch:
    """Ragged rows with a planted record, in host arrays."""
    tokens, mask = ragged_batch(
        rng, MODEL, prompts=planting.PROMPTS, group=planting.GROUP, prompt_width=WIDTH, width=NEW
    )
    loss_mask = np.asarray(mask) & (np.arange(WIDTH + NEW) >= WIDTH)
    noisy = -np.log(MODEL.vocab_size) + rng.standard_normal(loss_mask.shape)
    return TrainBatch(
        tokens=np.asarray(tokens), token_mask=np.asarray(mask), loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, noisy, 0).astype(np.float32),
        advantages=np.array([-1.0, 0.5, -0.25, 1.0], np.float32),
        guidance=planting.planted(rng, MODEL, ROLLOUT), prompt_width=WIDTH, group_size=planting.GROUP,
    )  # fmt: skip


def learner(memory: Any, rows: int, triage: TriageConfig = OFF) -> Learner:
    config = TrainerConfig(
        dtype="float32", frozen_dtype="float32", microbatch_rows=rows, logprob_chunk=8, remat="none",
        guidance_memory=memory, optim=OptimConfig(lr=1e-2),
    )  # fmt: skip
    return Learner(
        model=MODEL, side=TRAINER, config=config, triage=triage, stats="on",
        subset=plan(models.abstract_params(MODEL), config.trainable, num_layers=MODEL.num_layers),
        loss=Bound(grpo.loss, grpo.Config()), weights=Bound(tis.weights, tis.Config()),
    )  # fmt: skip


_UPDATE = jax.jit(update, static_argnames="learner")
_SCORE = jax.jit(score_batch, static_argnames="learner")


def updated(memory: str, given: TrainBatch, rows: int, triage: TriageConfig = OFF) -> Any:
    made = learner(memory, rows, triage)
    params = models.init_params(MODEL, jax.random.key(3))
    state = init_state(jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params), made.subset, made.config)
    placed, held = place(given, made.config, None)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(held)}
    assert kinds == ({HOST} if memory == "host" else set())
    scored = None if triage == OFF else _SCORE(state, placed, None, held, learner=made)
    return jax.device_get((_UPDATE(state, placed, None, held, learner=made), scored))


@pytest.mark.parametrize(
    ("rows", "triage"),
    [(1, OFF), (2, BOTH)],
    ids=["rows-1", "rows-2-triage"],
)
@pytest.mark.slow
def test_host_memory_changes_no_bit_of_scores_outcome_and_state(rows, triage, rng):
    given = batch(rng)
    on_device, in_host = (updated(memory, given, rows, triage) for memory in ("device", "host"))
    assert jax.tree.structure(on_device) == jax.tree.structure(in_host)
    jax.tree.map(np.testing.assert_array_equal, on_device, in_host)
    ((_, outcome), _) = on_device
    # the record steers: one that belongs to another microbatch gives other log-probs
    moved = jax.tree.map(lambda leaf: np.roll(leaf, planting.GROUP, axis=0), given.guidance)
    other = updated("host", dataclasses.replace(given, guidance=moved), rows, triage)[0][1]
    assert (np.abs(other.trainer_logprobs - outcome.trainer_logprobs).max(axis=1) > 1e-3).all()


def test_two_microbatches_of_the_record_lie_on_the_device(rng):
    record = batch(rng).guidance
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(record))
    assert device_bytes(record, TrainerConfig(), None) == whole
    assert device_bytes(record, TrainerConfig(updates_per_rollout=2), None) == whole // 2
    host = TrainerConfig(guidance_memory="host", microbatch_rows=1)
    assert device_bytes(record, host, None) == whole * 2 // ROWS
    one = dataclasses.replace(host, updates_per_rollout=4)
    assert device_bytes(record, one, None) == whole // ROWS


def test_what_cannot_be_is_refused(rng):
    class Bare:
        device_kind = "bare"

        def addressable_memories(self):
            return ()

    with pytest.raises(ValueError, match="device 'bare' has memory of kind : expected pinned_host among"):
        require_host_memory(Bare())
    made = learner("host", 2)
    state = init_state(models.init_params(MODEL, jax.random.key(3)), made.subset, made.config)
    with pytest.raises(ValueError, match="expected a batch from `stream.place`"):
        update(state, batch(rng), learner=made)
