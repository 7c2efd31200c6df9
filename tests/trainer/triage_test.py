"""TRIAGE inside an update: what reaches the log-probs by hand, and the same for every microbatching."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import algorithms, config, corrections, models, plugins
from fp4rl_jax.algorithms import dapo
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.config import ConfigError
from fp4rl_jax.corrections import tis
from fp4rl_jax.loop import Bound
from fp4rl_jax.objectives.triage import GateConfig, Microbatches, RepairConfig, TriageConfig
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.recipes import bf16
from fp4rl_jax.trainer import Learner, OptimConfig, TrainerConfig, init_state, plan, terms, update

MODEL = models.ModelConfig(vocab_size=24, num_layers=1, d_model=16, num_heads=1, num_kv_heads=1, d_ff=16)
ROWS, WIDTH, NEW = 4, 3, 7
BOTH = TriageConfig(
    gate=GateConfig(scope="q3", segment=4, mild=-0.1), repair=RepairConfig(scope="adv_positive", segment=4)
)


def make_batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    loss_mask = np.arange(WIDTH + NEW) < WIDTH + rng.integers(2, NEW + 1, ROWS)[:, None]
    token_mask, loss_mask = loss_mask, loss_mask & (np.arange(WIDTH + NEW) >= WIDTH)
    # about the random model's log-probs (ln 24 = 3.2), some far above, so that every case occurs
    rollout = rng.choice([-4.0, -3.0, -2.7, 4.0], loss_mask.shape, p=[0.2, 0.35, 0.35, 0.1])
    return TrainBatch(
        tokens=jnp.asarray(rng.integers(0, 24, loss_mask.shape), jnp.int32),
        token_mask=jnp.asarray(token_mask),
        loss_mask=jnp.asarray(loss_mask),
        rollout_logprobs=jnp.asarray(np.where(loss_mask, rollout, 0), jnp.float32),
        advantages=jnp.asarray([-1.0, 0.5, -0.25, 1.0]),
        prompt_width=WIDTH,
        group_size=2,
    )


def make_learner(triage: TriageConfig, rows: int | None = None) -> Learner:
    trainer = TrainerConfig(
        dtype="float32", frozen_dtype="float32", microbatch_rows=rows, logprob_chunk=16, remat="none",
        optim=OptimConfig(lr=1.0, b1=0.0, b2=0.0, eps=1.0, clip_norm=None),
    )  # fmt: skip
    return Learner(
        model=MODEL,
        side=Side(specs=bf16.trainer(bf16.Config()).resolve(models.sites(MODEL)), dtype="float32"),
        config=trainer,
        subset=plan(models.abstract_params(MODEL), trainer.trainable, num_layers=1),
        loss=Bound(dapo.loss, dapo.Config()),
        weights=Bound(tis.weights, tis.Config()),
        triage=triage,
    )


_UPDATE = jax.jit(update, static_argnames="learner")


@pytest.fixture(scope="module")
def whole():
    learner = make_learner(BOTH)
    state = init_state(models.init_params(MODEL, jax.random.key(2)), learner.subset, learner.config)
    return state, *_UPDATE(state, make_batch(), learner=learner)


def by_hand(logprobs: np.ndarray, batch: TrainBatch) -> tuple[float, float, float, np.ndarray]:
    """(policy loss, Repair's mean penalty, mean gate weight, gate weights), plain loops over segments."""
    mask, advantages = np.asarray(batch.loss_mask), np.asarray(batch.advantages)
    delta = np.where(mask, logprobs - np.asarray(batch.rollout_logprobs), 0)
    gate, penalty, count = np.ones(mask.shape), 0.0, 0
    for row in range(ROWS):
        for start in range(WIDTH, WIDTH + NEW, 4):
            cols = [t for t in range(start, min(start + 4, WIDTH + NEW)) if mask[row, t]]
            if not cols:
                continue
            mean, tail = delta[row, cols].mean(), (delta[row, cols] < -6).sum()
            count += 1
            if advantages[row] > 0:
                q = max(-0.03 - mean, 0)
                penalty += 0.0005 * (np.sqrt(1 + q * q / 0.0005) - 1)
            if advantages[row] < 0:
                w = min(0.1 if mean < -1.5 else 0.3 if mean < -0.1 else 1, 1 - 0.9 * min(tail / 2, 1))
                gate[row, [t for t in cols if delta[row, t] < 0]] = w
    token = -advantages[:, None] * np.minimum(np.exp(delta), 2.0)
    policy = np.sum(token * gate * mask) / np.sum(gate * mask)
    return policy, penalty / count, gate[mask].mean(), gate


@pytest.mark.slow
def test_the_update_reports_what_the_loops_say(whole):
    _, _, outcome = whole
    policy, penalty, weight, gate = by_hand(np.asarray(outcome.trainer_logprobs), make_batch())
    assert len(np.unique(np.float32(gate))) >= 3 and penalty > 0  # every branch takes part
    assert float(outcome.loss) == pytest.approx(policy, rel=1e-5)
    assert float(outcome.metrics["triage/repair"].mean()) == pytest.approx(penalty, rel=1e-5)
    assert float(outcome.metrics["triage/gate_weight"].mean()) == pytest.approx(weight, rel=1e-6)


def with_microbatches(choice: Microbatches) -> TriageConfig:
    return dataclasses.replace(BOTH, gate=dataclasses.replace(BOTH.gate, microbatches=choice))


@pytest.mark.fast_cases("keep_inputs")
@pytest.mark.parametrize("choice", ["keep_inputs", "score_twice"])
def test_microbatches_give_the_same_update(whole, choice):
    """The weighted mean and Repair have denominators of the whole update, whatever is in memory."""
    state, new, outcome = whole
    learner = make_learner(with_microbatches(choice), rows=2)
    assert BOTH.counts_weights and learner.adds_terms
    other, parts = _UPDATE(state, make_batch(), learner=learner)
    np.testing.assert_allclose(parts.trainer_logprobs, outcome.trainer_logprobs, atol=2e-6)
    assert float(parts.loss) == pytest.approx(float(outcome.loss), rel=1e-5)
    assert float(parts.grad_norm) == pytest.approx(float(outcome.grad_norm), rel=1e-5)
    for name, sums in outcome.metrics.items():
        assert float(parts.metrics[name].mean()) == pytest.approx(float(sums.mean()), rel=1e-5), name
    for path, leaf in new.trainable.items():
        moved = np.asarray(leaf) - np.asarray(state.trainable[path])
        again = np.asarray(other.trainable[path]) - np.asarray(state.trainable[path])
        np.testing.assert_allclose(again, moved, atol=2e-5 * np.abs(moved).max(), err_msg=path)


def test_kept_inputs_cost_no_second_forward():
    """The compiler counts the forward's FLOP once more for scoring twice, not for keeping."""

    def flop(triage: TriageConfig) -> float:
        learner = make_learner(triage, rows=2)
        state = init_state(models.init_params(MODEL, jax.random.key(2)), learner.subset, learner.config)
        cost = _UPDATE.lower(state, make_batch(), learner=learner).compile().cost_analysis()
        assert cost is not None
        return cost["flops"]

    off, kept, twice = map(flop, (TriageConfig(), *map(with_microbatches, ("keep_inputs", "score_twice"))))
    assert kept < 1.1 * off < 1.2 * off < twice, (off, kept, twice)


@pytest.mark.fast_cases("keep_inputs")
@pytest.mark.parametrize("choice", ["keep_inputs", "score_twice"])
def test_masters_in_bfloat16_add_their_microbatches_in_float32(choice):
    """Both ways round a microbatch's gradient once at most: within two roundings of the float32 sum."""
    learner = make_learner(with_microbatches(choice), rows=1)
    wide = init_state(models.init_params(MODEL, jax.random.key(2)), learner.subset, learner.config)
    wide = dataclasses.replace(wide, trainable=_rounded(wide.trainable))
    narrow = dataclasses.replace(
        wide, trainable={path: x.astype(jnp.bfloat16) for path, x in wide.trainable.items()}
    )
    _, exact = _UPDATE(wide, make_batch(), learner=learner)
    _, found = _UPDATE(narrow, make_batch(), learner=learner)
    assert float(found.loss) == pytest.approx(float(exact.loss), rel=1e-5)
    assert float(found.grad_norm) == pytest.approx(float(exact.grad_norm), rel=2 * 2**-9)


def _rounded(trainable: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: x.astype(jnp.bfloat16).astype(jnp.float32) for path, x in trainable.items()}


@pytest.mark.parametrize("choice", ["keep_inputs", "score_twice"])
def test_a_non_finite_row_skips_the_update_and_is_named(choice):
    learner = make_learner(with_microbatches(choice), rows=2)
    state = init_state(models.init_params(MODEL, jax.random.key(2)), learner.subset, learner.config)
    batch = make_batch()
    bad = dataclasses.replace(batch, advantages=batch.advantages.at[1].set(jnp.nan))
    new, outcome = _UPDATE(state, bad, learner=learner)
    assert not outcome.applied and not outcome.finite_rows[1]
    for path, leaf in new.trainable.items():
        np.testing.assert_array_equal(leaf, state.trainable[path])


def test_guidance_in_host_memory_needs_the_second_scoring():
    words = [
        "triage.gate.scope=q3", "triage.repair.scope=all", "trainer.guidance_memory=host",
        "trainer.microbatch_rows=2", "loop.num_prompts=2", "loop.group_size=2",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match='keep_inputs.*expected "score_twice"'):
        config.load(overrides=words)
    config.load(overrides=[*words, "triage.gate.microbatches=score_twice"])
    config.load(overrides=[*words, "triage.gate.reduction=response"])


@pytest.mark.parametrize("reduction", ["update", "response", "algorithm"])
def test_the_slope_at_the_logprobs_is_that_of_the_documented_loss(reduction):
    """d (sum / count) / d logprobs against the formula, with dapo's own mean and both weighted ones."""
    batch = make_batch()
    noise = np.random.default_rng(1).normal(0, 0.05, batch.loss_mask.shape)
    logprobs = jnp.asarray(np.where(batch.loss_mask, noise - np.log(24), 0), jnp.float32)
    chosen = dataclasses.replace(BOTH, gate=dataclasses.replace(BOTH.gate, reduction=reduction))
    learner, mask = make_learner(chosen), np.asarray(batch.loss_mask)
    shares = jax.tree.map(lambda x: x[None], batch)
    denominators = terms.Denominators(loss=None, segments=terms.num_segments(shares, chosen))

    def loss(lp):
        share = terms.gated(batch, jax.lax.stop_gradient(lp), chosen)
        delta = jnp.where(batch.loss_mask, jax.lax.stop_gradient(lp) - batch.rollout_logprobs, 0)
        found = learner.loss(lp, share, learner.weights(delta, batch.loss_mask))
        extra, _ = terms.added(share, lp, chosen, denominators)
        return (found.sum + extra * found.count) / found.count

    *_, gate = by_hand(np.asarray(logprobs), batch)
    assert len(np.unique(np.float32(gate))) >= 3
    delta = np.where(mask, logprobs - batch.rollout_logprobs, 0)
    slope = -np.asarray(batch.advantages)[:, None] * np.minimum(np.exp(delta), 2.0) * gate * mask
    each = (gate * mask).sum(1, keepdims=True)
    slope /= {"update": each.sum(), "response": each * ROWS, "algorithm": mask.sum()}[reduction]
    for row in (1, 3):  # the positive advantages
        for start in range(WIDTH, WIDTH + NEW, 4):
            cols = [t for t in range(start, min(start + 4, WIDTH + NEW)) if mask[row, t]]
            if cols:
                q = max(-0.03 - delta[row, cols].mean(), 0)
                pull = q / np.sqrt(1 + q * q / 0.0005) / len(cols)
                slope[row, cols] -= 0.015 * pull / float(denominators.segments)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logprobs), slope, rtol=2e-5, atol=1e-8)


@pytest.mark.fast_cases("tis")
@pytest.mark.parametrize("correction", plugins.names(corrections))
def test_gate_and_repair_compose_with_every_algorithm_under_every_correction(correction):
    """The Gate scales what the correction lets through, Repair adds to it; off, neither is there."""
    batch, weigh = make_batch(), plugins.load(corrections, correction)
    noise = np.random.default_rng(1).normal(0, 0.05, batch.loss_mask.shape)
    logprobs = jnp.asarray(np.where(batch.loss_mask, noise - np.log(24), 0), jnp.float32)
    batch = dataclasses.replace(batch, old_logprobs=logprobs)
    delta = jnp.where(batch.loss_mask, logprobs - batch.rollout_logprobs, 0)
    weights = weigh.weights(delta, batch.loss_mask, weigh.Config())

    def slope(algorithm, config: TriageConfig) -> np.ndarray:
        shares = jax.tree.map(lambda x: x[None], batch)
        denominators = terms.Denominators(loss=None, segments=terms.num_segments(shares, config))

        def loss(lp):
            share = terms.gated(batch, jax.lax.stop_gradient(lp), config)
            found = algorithm.loss(lp, share, weights, algorithm.Config())
            extra, _ = terms.added(share, lp, config, denominators)
            return (found.sum + extra * found.count) / found.count

        return np.asarray(jax.grad(loss)(logprobs))

    gate = dataclasses.replace(BOTH, repair=RepairConfig())
    for name in plugins.names(algorithms):
        algorithm = plugins.load(algorithms, name)
        plain, gated, both = (slope(algorithm, config) for config in (TriageConfig(), gate, BOTH))
        assert np.all(np.isfinite(both)), name
        assert np.any(plain) == np.any(gated) == np.any(np.asarray(weights)), name
        assert not np.any(plain) or np.any(gated != plain), name
        assert np.any(both != gated), name  # Repair pulls whatever the correction drops
