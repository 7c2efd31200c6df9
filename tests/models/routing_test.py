"""Routing by hand, and routing replay: a planted pattern of experts that any misalignment breaks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.models import guidance, logprobs, routing
from fp4rl_jax.objectives import mixture
from tests.models.helpers import plain_side, ragged_batch

MOE = models.ModelConfig(
    family="qwen3_moe", vocab_size=32, num_layers=2, d_model=16, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=5, num_active=2, d_expert=8, qk_norm=True, max_length=32,
)  # fmt: skip
SCORES = np.array(
    [[2.0, 1.0, 0.0, -1.0, -9.0], [0.5, 0.5, 3.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]], np.float32
)
RECORD = np.array([[4, 1], [2, 0], [255, 255]], np.uint8)
_ROUTE = jax.jit(routing.route, static_argnames=("config", "order", "replay"))


def routes(scores, record=None, replay="off", config=MOE):
    """Routing of tokens whose scores are given: the router is the identity."""
    config = dataclasses.replace(config, d_model=5)
    record = None if record is None else jnp.asarray(record)
    return _ROUTE(jnp.asarray(scores), jnp.eye(5), config=config, order="free", record=record, replay=replay)


def gates_of(scores, experts):
    mass = np.exp(np.take_along_axis(scores, experts, -1))
    return mass / mass.sum(-1, keepdims=True)


def test_own_choices_and_replayed_ones_by_hand():
    own = np.array([[0, 1], [2, 4], [0, 1]])  # the lower index among equals
    free = routes(SCORES)
    np.testing.assert_array_equal(free.experts, own)
    np.testing.assert_allclose(free.gates, gates_of(SCORES, own), rtol=1e-6)
    replayed = routes(SCORES, RECORD, "on")
    taken = np.array([[4, 1], [2, 0], [0, 1]])  # the token without a record routes by itself
    np.testing.assert_array_equal(replayed.experts, taken)
    np.testing.assert_allclose(replayed.gates, gates_of(SCORES, taken), rtol=1e-6)
    np.testing.assert_array_equal(replayed.recorded, [True, True, False])
    measured = routes(SCORES, RECORD, "measure")
    np.testing.assert_array_equal(measured.experts, own)
    np.testing.assert_array_equal(measured.own, own)


def test_a_record_of_the_own_choices_changes_no_bit():
    scores = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    free = routes(scores)
    again = routes(scores, np.asarray(free.experts).astype(np.uint8), "on")
    np.testing.assert_array_equal(again.gates, free.gates)


def test_the_router_keeps_its_gradient_under_replay():
    config, pull = dataclasses.replace(MOE, d_model=5), jnp.array([1.0, 0.0])

    def first_gate(scores):
        found = routing.route(
            scores, jnp.eye(5), config=config, order="free", record=jnp.asarray(RECORD), replay="on"
        )
        return jnp.sum(found.gates[:2] @ pull)

    slope = jax.jit(jax.grad(first_gate))(jnp.asarray(SCORES))
    gates = gates_of(SCORES, np.array([[4, 1], [2, 0], [0, 1]]))
    want = np.zeros_like(SCORES)
    for row, (first, second) in enumerate([(4, 1), (2, 0)]):
        want[row, first] = gates[row, 0] * gates[row, 1]
        want[row, second] = -gates[row, 0] * gates[row, 1]
    np.testing.assert_allclose(slope, want, rtol=1e-5, atol=1e-9)


def test_what_is_watched_counts_real_tokens_only():
    real = jnp.array([True, True, False])
    found = routes(SCORES, RECORD, "on")
    seen = routing.watch(found, real, jnp.array([1, 1, 1, 0, 1]), jnp.asarray(RECORD), what="all")
    np.testing.assert_array_equal(seen.assigned, [1, 1, 1, 0, 1])
    assert (int(seen.tokens), int(seen.computed), int(seen.recorded), int(seen.changed)) == (2, 4, 2, 2)
    probs = np.exp(SCORES) / np.exp(SCORES).sum(-1, keepdims=True)
    np.testing.assert_allclose(seen.prob_sum, probs[:2].sum(0), rtol=1e-5)
    np.testing.assert_allclose(seen.entropy_sum, -(probs * np.log(probs))[:2].sum(), rtol=1e-5)
    swapped = routes(SCORES, np.array([[1, 0], [2, 4], [0, 1]], np.uint8), "measure")
    order = routing.watch(
        swapped, real, jnp.zeros(5, jnp.int32), jnp.array([[1, 0], [2, 4], [0, 1]]), what="all"
    )
    assert int(order.changed) == 0  # the same experts in another order are the same


def test_balance_by_hand():
    assigned = jnp.array([[4, 0, 0, 0], [1, 1, 1, 1]])  # two layers, four experts, A = 2, two tokens
    probs = jnp.array([[1.6, 0.2, 0.1, 0.1], [0.5, 0.5, 0.5, 0.5]])
    tokens = jnp.array([2, 2])
    value, slope = jax.value_and_grad(lambda p: mixture.load_balance_loss(assigned, p, tokens))(probs)
    assert float(value) == pytest.approx((4 * 0.8 + 1.0) / 2)
    np.testing.assert_allclose(slope, [[1.0, 0, 0, 0], [0.25] * 4], rtol=1e-6)
    found = mixture.mixture_metrics(assigned, jnp.array([4, 3]), tokens, jnp.array([0.5, 1.5]), num_active=2)
    means = {name: float(sums.mean()) for name, sums in found.items()}
    assert means == pytest.approx({
        "moe/load_max": (4 + 1) / 2, "moe/load_entropy": 0.5, "moe/idle_share": 3 / 8,
        "moe/router_entropy": 0.5, "moe/dropped_share": 1 / 8,
    })  # fmt: skip
    nothing = mixture.load_balance_loss(
        jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32)
    )
    assert float(nothing) == 0.0
    assert float(mixture.changed_share(jnp.array([1, 2]), jnp.array([4, 8])).mean()) == 0.25


PROMPTS, GROUP, WIDTH, NEW = 2, 2, 4, 5


def planted(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[B, T, L, A] random pairs of experts, the sentinel on padding, one pattern a prompt."""
    rows, total = mask.shape
    pairs = np.argsort(rng.random((rows, total, MOE.num_layers, MOE.num_experts)), axis=-1)[..., :2]
    pairs[:, :WIDTH] = np.repeat(pairs[::GROUP, :WIDTH], GROUP, axis=0)
    return np.where(mask[..., None, None], pairs, 255).astype(np.uint8)


def _score(params, tokens, mask, record, *, width, group, side):
    return logprobs.score(
        models.fuse(params), tokens, mask, prompt_width=width, group_size=group, config=MOE, side=side,
        temperature=1.0, chunk=8, entropy="off", guidance={routing.RECORD: record}, watch="all",
    )  # fmt: skip


_SCORE = jax.jit(_score, static_argnames=("width", "group", "side"))


@pytest.mark.slow
def test_a_planted_pattern_reaches_the_token_and_layer_it_was_planted_at(rng):
    """Every row scored alone, without padding or group, takes the same experts and has the same log-probs."""
    side = dataclasses.replace(plain_side(MOE), replay="on")
    params = models.init_params(MOE, jax.random.key(3))
    params = jax.tree.map(lambda w: w * 8 if w.ndim > 2 else w, params)
    tokens, mask = ragged_batch(rng, MOE, prompts=PROMPTS, group=GROUP, prompt_width=WIDTH, width=NEW)
    record = planted(mask, rng)
    whole = _SCORE(params, tokens, mask, record, width=WIDTH, group=GROUP, side=side)
    assert int(whole.watched.changed.sum()) > 0.3 * int(whole.watched.recorded.sum())
    shifted = _SCORE(params, tokens, mask, np.roll(record, 1, axis=1), width=WIDTH, group=GROUP, side=side)
    assert np.abs(shifted.logprobs - whole.logprobs).max() > 1e-2  # the pattern matters
    for row in (0, PROMPTS * GROUP - 1):
        first = int(np.argmax(mask[row]))
        end = first + int(mask[row].sum())
        real = slice(first, end)
        alone = _SCORE(
            params, tokens[row, None, real], mask[row, None, real], record[row, None, real],
            width=WIDTH - first, group=1, side=side,
        )  # fmt: skip
        np.testing.assert_allclose(alone.logprobs[0], whole.logprobs[row, real], rtol=0, atol=2e-5)
        taken = np.moveaxis(np.asarray(alone.watched.experts)[:, 0], 0, 1)  # [T - 1, L, A]
        np.testing.assert_array_equal(taken, record[row, first : end - 1])


def test_microbatches_and_groups_cut_the_record_as_they_cut_the_tokens(rng):
    tokens, mask = ragged_batch(rng, MOE, prompts=PROMPTS, group=GROUP, prompt_width=WIDTH, width=NEW)
    cases = {"record": planted(mask, rng), "tokens": tokens[..., None]}
    whole = guidance.pack_hint(cases, prompt_width=WIDTH, group_size=GROUP)
    assert whole["record"].shape == (2, PROMPTS, WIDTH + GROUP * (NEW - 1), 2)
    for rows, group in ((2, 2), (1, 1)):  # whole groups, and shares of a group
        for start in range(0, PROMPTS * GROUP, rows):
            part = {name: x[start : start + rows] for name, x in cases.items()}
            found = guidance.pack_hint(part, prompt_width=WIDTH, group_size=group)
            prompt, inside = divmod(start, GROUP)
            columns = [*range(WIDTH), *range(WIDTH + inside * (NEW - 1), WIDTH + (inside + rows) * (NEW - 1))]
            for name, x in found.items():
                np.testing.assert_array_equal(x[:, 0], whole[name][:, prompt, np.array(columns)])


def test_a_record_takes_a_byte_a_choice_while_the_experts_fit():
    assert routing.record_bytes(MOE) == 2 * 2 and routing.sentinel(routing.record_dtype(MOE)) == 255
    wide = dataclasses.replace(MOE, num_experts=256)
    assert routing.record_bytes(wide) == 8 and routing.sentinel(routing.record_dtype(wide)) == 65535


def test_what_needs_experts_is_refused_without_them():
    dense = models.ModelConfig()
    models.MoeConfig().require(dense)
    for change in ({"replay": "on"}, {"balance_coef": 0.1}):
        with pytest.raises(ValueError, match="the model has no experts"):
            models.MoeConfig(**change).require(dense)
    with pytest.raises(ValueError, match="moe.balance_coef is -1"):
        models.MoeConfig(balance_coef=-1.0)
