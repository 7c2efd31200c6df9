"""The update against a straight-line implementation, and what it must leave alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp4rl_jax import models
from fp4rl_jax.algorithms import grpo
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.corrections import tis
from fp4rl_jax.loop import Bound
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.recipes import bf16, qat_w4a4, qat_w4a16
from fp4rl_jax.trainer import Learner, OptimConfig, TrainerConfig, backbone, init_state, plan, update

MODEL = models.ModelConfig(vocab_size=40, num_layers=3, d_model=32, num_heads=2, num_kv_heads=1, d_ff=48)
ROWS, GROUP, WIDTH, NEW = 8, 4, 5, 6
#: One update moves a parameter by -lr * g / (|g| + 1), from which the gradient can be read.
OPTIM = OptimConfig(lr=1.0, b1=0.0, b2=0.0, eps=1.0, clip_norm=1.0)


def make_learner(recipe=bf16, *, order="free", dtype="float32", **trainer) -> Learner:
    config = TrainerConfig(dtype=dtype, frozen_dtype="float32", optim=OPTIM, logprob_chunk=16, **trainer)
    side = Side(specs=recipe.trainer(recipe.Config()).resolve(models.sites(MODEL)), dtype=dtype, order=order)
    return Learner(
        model=MODEL,
        side=side,
        config=config,
        subset=plan(models.abstract_params(MODEL), config.trainable, num_layers=MODEL.num_layers),
        loss=Bound(grpo.loss, grpo.Config()),
        weights=Bound(tis.weights, tis.Config()),
    )


def make_params():
    return models.init_params(MODEL, jax.random.key(0))


def make_batch(seed: int = 1) -> TrainBatch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, MODEL.vocab_size, (ROWS, WIDTH + NEW)).astype(np.int32)
    tokens[:, :WIDTH] = np.repeat(tokens[::GROUP, :WIDTH], GROUP, axis=0)
    lengths = rng.integers(1, NEW + 1, ROWS)
    columns = np.arange(WIDTH + NEW)
    loss_mask = (columns >= WIDTH) & (columns < WIDTH + lengths[:, None])
    token_mask = (columns >= 1) & (columns < WIDTH + lengths[:, None])  # one column of left padding
    logprobs = np.where(loss_mask, rng.uniform(-5, -2, loss_mask.shape), 0.0).astype(np.float32)
    advantages = rng.normal(size=ROWS).astype(np.float32)
    return TrainBatch(
        tokens=jnp.asarray(tokens),
        token_mask=jnp.asarray(token_mask),
        loss_mask=jnp.asarray(loss_mask),
        rollout_logprobs=jnp.asarray(logprobs),
        advantages=jnp.asarray(advantages),
        prompt_width=WIDTH,
        group_size=GROUP,
    )


def plain_loss(params, batch: TrainBatch):
    """GRPO with TIS over whole sequences, every row by itself: no shared prompt, no chunks."""
    side = make_learner().side
    positions = models.positions_of(batch.token_mask)
    hidden = models.forward(
        models.fuse(params),
        batch.tokens,
        config=MODEL,
        side=side,
        positions=positions,
        token_mask=batch.token_mask,
    ).hidden
    scores = jax.nn.log_softmax(hidden @ params["embed"].T)
    picked = jnp.take_along_axis(scores[:, :-1], batch.tokens[:, 1:, None], axis=-1)[..., 0]
    logprobs = jnp.where(batch.loss_mask, jnp.pad(picked, ((0, 0), (1, 0))), 0.0)
    weight = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logprobs) - batch.rollout_logprobs), 2.0)
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    token = jnp.where(batch.loss_mask, -ratio * batch.advantages[:, None] * weight, 0.0)
    return jnp.mean(token.sum(-1) / batch.loss_mask.sum(-1)), logprobs


def test_update_equals_the_straight_line_form():
    learner, params, batch = make_learner(), make_params(), make_batch()
    (loss, logprobs), grads = jax.jit(jax.value_and_grad(plain_loss, has_aux=True))(params, batch)
    state = init_state(params, learner.subset, learner.config)
    new, outcome = jax.jit(update, static_argnames="learner")(state, batch, learner=learner)
    np.testing.assert_allclose(outcome.loss, loss, rtol=2e-5)
    np.testing.assert_allclose(outcome.trainer_logprobs, logprobs, atol=2e-5)
    np.testing.assert_allclose(outcome.grad_norm, optax.tree.norm(grads), rtol=1e-4)
    scale = min(1.0, 1.0 / float(optax.tree.norm(grads)))
    for path, gradient in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        want = -np.asarray(gradient) * scale / (np.abs(gradient) * scale + 1.0)
        got = np.asarray(new.trainable[name]) - np.asarray(state.trainable[name])
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max() + 1e-7, err_msg=name)
    assert int(new.updates) == 1 and bool(outcome.applied)


@pytest.mark.slow
def test_the_ratio_is_exactly_one_at_the_first_update():
    learner, batch = make_learner(qat_w4a4, dtype="bfloat16"), make_batch()
    learner = dataclasses.replace(learner, stats="on")
    state = init_state(make_params(), learner.subset, learner.config)
    _, outcome = jax.jit(update, static_argnames="learner")(state, batch, learner=learner)
    ratio = outcome.metrics["policy_ratio"]
    assert float(ratio.total) == float(ratio.count) == float(batch.loss_mask.sum())
    assert float(outcome.metrics["policy_clipped_share"].total) == 0.0
    # Statistics count real tokens: of each prompt once, and of completions all but the last column's.
    real = int(batch.token_mask[::GROUP, :WIDTH].sum() + batch.token_mask[:, WIDTH:-1].sum())
    for site, size in {"attn/qkv": 32, "attn/out": 32, "mlp/gate_up": 32, "mlp/down": 48}.items():
        act = outcome.stats[site]["act"]
        assert int(act["saturation"].count) == real * size * MODEL.num_layers, site
        assert 0 < int(act["underflow"].total) < int(act["underflow"].count) <= int(act["saturation"].count)
    assert int(outcome.stats["mlp/down"]["weight"]["saturation"].count) == 3 * 32 * 48


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [bf16, qat_w4a16, qat_w4a4], ids=lambda recipe: recipe.__name__)
def test_the_backbone_changes_no_bit(recipe):
    learner = make_learner(recipe, dtype="bfloat16", trainable=("layers/[12]/*",))
    state, batch = init_state(make_params(), learner.subset, learner.config), make_batch()
    ready = jax.jit(lambda frozen: backbone(frozen, model=MODEL, side=learner.side))(state.frozen)
    step = jax.jit(update, static_argnames="learner")
    with_base, without = step(state, batch, ready, learner=learner), step(state, batch, learner=learner)
    for a, b in zip(jax.tree.leaves(with_base), jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(a, b)


def test_frozen_parameters_stay_and_trained_ones_move():
    learner = make_learner(trainable=("layers/2/mlp/*",))
    state = init_state(make_params(), learner.subset, learner.config)
    new, _ = jax.jit(update, static_argnames="learner")(state, make_batch(), learner=learner)
    assert sorted(new.trainable) == [f"layers/above/mlp/{name}" for name in ("down", "gate", "up")]
    for path, leaf in new.frozen.items():
        np.testing.assert_array_equal(leaf, state.frozen[path])
    for path, leaf in new.trainable.items():
        assert float(jnp.max(jnp.abs(leaf - state.trainable[path]))) > 0, path


@pytest.mark.fast_cases("advantages")
@pytest.mark.parametrize("where", ["advantages", "rollout_logprobs"])
def test_a_non_finite_batch_changes_nothing_but_the_count_and_is_located(where):
    learner = make_learner(microbatch_rows=2)
    state = init_state(make_params(), learner.subset, learner.config)
    batch = make_batch()
    index = (5,) if where == "advantages" else (5, WIDTH)
    batch = batch.replace(**{where: getattr(batch, where).at[index].set(jnp.nan)})
    new, outcome = jax.jit(update, static_argnames="learner")(state, batch, learner=learner)
    assert not bool(outcome.applied)
    assert int(new.skipped) == int(new.skipped_total) == 1 and int(new.updates) == 0
    for path, leaf in new.trainable.items():
        np.testing.assert_array_equal(leaf, state.trainable[path])
    for a, b in zip(jax.tree.leaves(new.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.flatnonzero(~np.asarray(outcome.finite_rows)), [4, 5])
    assert not any(bool(finite) for path, finite in outcome.finite_leaves.items() if "mlp" in path)


@pytest.mark.slow
def test_a_good_update_clears_the_count_in_a_row():
    learner = make_learner()
    state = init_state(make_params(), learner.subset, learner.config)
    step = jax.jit(update, static_argnames="learner")
    bad = make_batch().replace(advantages=jnp.full(ROWS, jnp.inf))
    state, _ = step(state, bad, learner=learner)
    state, _ = step(state, bad, learner=learner)
    assert int(state.skipped) == 2
    state, _ = step(state, make_batch(), learner=learner)
    assert (int(state.skipped), int(state.skipped_total), int(state.updates)) == (0, 2, 1)


def _two_splits(recipe, order, dtype):
    batch = make_batch()
    found = []
    for rows in (None, 4, 2):
        learner = make_learner(recipe, order=order, dtype=dtype, microbatch_rows=rows)
        state = init_state(make_params(), learner.subset, learner.config)
        found.append(jax.jit(update, static_argnames="learner")(state, batch, learner=learner))
    return found


@pytest.mark.slow
def test_microbatches_do_not_change_the_logprobs_in_fixed_order():
    (_, whole), *parts = _two_splits(qat_w4a4, "fixed", "bfloat16")
    for _, outcome in parts:
        np.testing.assert_array_equal(outcome.trainer_logprobs, whole.trainer_logprobs)
        ulp = np.spacing(np.float32(max(abs(float(whole.loss)), 1.0)))
        assert abs(float(outcome.loss) - float(whole.loss)) <= 4 * ulp
        for name, sums in whole.metrics.items():
            assert float(outcome.metrics[name].count) == float(sums.count), name


def test_all_masked_batches_survive():
    learner = make_learner()
    state = init_state(make_params(), learner.subset, learner.config)
    empty = make_batch().replace(loss_mask=jnp.zeros((ROWS, WIDTH + NEW), bool))
    new, outcome = jax.jit(update, static_argnames="learner")(state, empty, learner=learner)
    assert float(outcome.loss) == 0.0 and float(outcome.grad_norm) == 0.0 and bool(outcome.applied)
    for path, leaf in new.trainable.items():
        np.testing.assert_array_equal(leaf, state.trainable[path])


def test_a_state_of_non_finite_parameters_is_refused_by_path():
    learner, params = make_learner(), make_params()
    params["layers"]["mlp"]["up"] = params["layers"]["mlp"]["up"].at[1, 0, 0].set(jnp.inf)
    with pytest.raises(ValueError, match="layers/mlp/up is not finite"):
        init_state(params, learner.subset, learner.config)


@pytest.mark.slow
def test_two_equal_learners_trace_once():
    traces = []

    def counted(state, batch, *, learner):
        traces.append(1)
        return update(state, batch, learner=learner)

    step = jax.jit(counted, static_argnames="learner")
    first, second = make_learner(), dataclasses.replace(make_learner())
    state = init_state(make_params(), first.subset, first.config)
    step(state, make_batch(), learner=first)
    step(state, make_batch(2), learner=second)
    assert first == second and hash(first) == hash(second) and len(traces) == 1


@pytest.mark.slow
def test_bfloat16_masters_are_those_of_float32_rounded():
    """From equal values, and within the roundings of bfloat16 (2^-8 each)."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), make_params())
    moved = {}
    for masters in ("float32", "bfloat16"):
        learner = make_learner(master_dtype=masters)
        state = init_state(params, learner.subset, learner.config)
        moved[masters], outcome = jax.jit(update, static_argnames="learner")(
            state, make_batch(), learner=learner
        )
        assert bool(outcome.applied)
    for path, narrow in moved["bfloat16"].trainable.items():
        assert narrow.dtype == jnp.bfloat16
        if path == "embed":  # a sum over positions, whose partial sums are rounded too
            continue
        start, wide, narrow = (
            np.asarray(x, np.float32)
            for x in (state.trainable[path], moved["float32"].trainable[path], narrow)
        )
        # a change carries the roundings of a gradient's terms, of their sum and of the clipping norm
        unit = 2.0**-8
        bound = unit * np.abs(wide) + 3 * unit * np.abs(wide - start) + 1e-6
        assert np.all(np.abs(narrow - wide) <= bound), path
    kept = jax.tree.map(lambda leaf: leaf.dtype, moved["bfloat16"].opt_state)
    assert kept == jax.tree.map(lambda leaf: leaf.dtype, state.opt_state)
