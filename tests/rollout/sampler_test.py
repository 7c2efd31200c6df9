"""The sampler: rows, limits, stop tokens, groups, log-probs, greedy, compilation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.batch import concatenate_rows
from fp4rl_jax.rollout import SamplingConfig, publish, row_keys
from tests.rollout import tiny

NEVER_STOP = SamplingConfig(max_new_tokens=6, pad_token=0)


def setup(name: str = "dense", recipe: str = "bf16", **side_options):
    config = tiny.CONFIGS[name]
    _, side = tiny.sides(recipe, config, **side_options)
    published = publish(tiny.params(name), config=config, side=side, version=3)
    return published, {"config": config, "side": side}


@partial(jax.jit, static_argnames=("config", "side"))
def logits_after(params, tokens, *, config, side):
    """[B, T, V] float32 logits after every token of right-padded rows, by one forward without any cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = models.forward(
        params, tokens, config=config, side=side, positions=positions, token_mask=jnp.ones_like(tokens, bool)
    )
    return models.logits(params, out.hidden)


def unpadded(out, mask):
    """Each row's real tokens moved to the left, [B, T], and the length of its prompt, [B]."""
    real = [np.asarray(t)[np.asarray(m)] for t, m in zip(out.tokens, out.token_mask, strict=True)]
    rows = np.zeros(out.tokens.shape, np.int32)
    for row, tokens in enumerate(real):
        rows[row, : len(tokens)] = tokens
    return rows, mask.sum(axis=1)


def test_layout_masks_and_versions():
    published, statics = setup()
    tokens, mask = tiny.prompts(3)
    out = tiny.draw(published, tokens, mask, **statics, group_size=2)
    assert out.tokens.shape == (6, 14) and out.prompt_width == 8 and out.group_size == 2
    np.testing.assert_array_equal(out.tokens[:, :8], np.repeat(tokens, 2, axis=0))
    np.testing.assert_array_equal(out.token_mask[:, :8], np.repeat(mask, 2, axis=0))
    assert not out.loss_mask[:, :8].any() and int(out.params_version) == 3
    np.testing.assert_array_equal(out.loss_mask[:, 8:], out.token_mask[:, 8:])
    assert (np.asarray(out.rollout_logprobs)[~np.asarray(out.loss_mask)] == 0).all()
    assert (np.asarray(out.tokens)[~np.asarray(out.token_mask)] == 0).all()
    assert dict(out.provenance)["rollout.dtype"] == "float32"


@pytest.mark.slow
def test_layers_apart_sample_the_same():
    published, statics = setup(recipe="qat_w4a4", order="fixed")
    tokens, mask = tiny.prompts(2)
    stacked, apart = (
        tiny.draw(
            published, tokens, mask, **statics, sampling=SamplingConfig(max_new_tokens=3, layers=layers)
        )
        for layers in ("stacked", "apart")
    )
    np.testing.assert_array_equal(stacked.tokens, apart.tokens)
    np.testing.assert_array_equal(stacked.rollout_logprobs, apart.rollout_logprobs)


def test_stop_tokens_end_a_row_and_are_kept():
    published, statics = setup()
    tokens, mask = tiny.prompts(4)
    free = tiny.draw(published, tokens, mask, **statics, sampling=NEVER_STOP)
    stop = int(free.tokens[0, 10])  # the third token of row 0, wherever else it occurs
    sampling = SamplingConfig(max_new_tokens=6, pad_token=0, stop_tokens=(stop,))
    out = tiny.draw(published, tokens, mask, **statics, sampling=sampling)
    completions, plain = np.asarray(out.tokens[:, 8:]), np.asarray(free.tokens[:, 8:])
    for row in range(4):
        at = np.flatnonzero(plain[row] == stop)
        length = int(at[0]) + 1 if at.size else 6
        np.testing.assert_array_equal(completions[row, :length], plain[row, :length])
        assert (completions[row, length:] == 0).all()
        assert int(out.loss_mask[row].sum()) == length and bool(out.finished[row]) == bool(at.size)
    assert bool(out.finished[0]) and not free.finished.any()


def test_row_limits_cut_each_row_by_itself():
    published, statics = setup()
    tokens, mask = tiny.prompts(4)
    whole = tiny.draw(published, tokens, mask, **statics, sampling=NEVER_STOP)
    limits = jnp.array([0, 1, 4, 99], jnp.int32)
    out = tiny.draw(published, tokens, mask, **statics, sampling=NEVER_STOP, row_limits=limits)
    np.testing.assert_array_equal(out.loss_mask.sum(axis=1), [0, 1, 4, 6])
    kept = np.asarray(out.loss_mask)
    np.testing.assert_array_equal(np.asarray(out.tokens)[kept], np.asarray(whole.tokens)[kept])
    assert not out.finished.any()


@pytest.mark.parametrize("name", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
def test_group_shares_its_prompt_and_equals_repeated_prompts(name):
    published, statics = setup(name, order="fixed")
    tokens, mask = tiny.prompts(3)
    keys = row_keys(jax.random.key(1), jnp.arange(12))
    grouped = tiny.draw(published, tokens, mask, **statics, group_size=4, keys=keys)
    apart = tiny.draw(published, np.repeat(tokens, 4, 0), np.repeat(mask, 4, 0), **statics, keys=keys)
    np.testing.assert_array_equal(grouped.tokens, apart.tokens)
    np.testing.assert_array_equal(grouped.rollout_logprobs, apart.rollout_logprobs)
    assert len({tuple(row) for row in np.asarray(grouped.tokens[:4]).tolist()}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), [("dense", "qat_w4a4"), ("dense", "bf16"), ("moe", "qat_w4a4")])
def test_a_row_does_not_depend_on_its_batch_mates(name, recipe):
    """Bit for bit with the fixed order: permuted, alone, and with other batch mates."""
    published, statics = setup(name, recipe, order="fixed")
    tokens, mask = tiny.prompts(5)
    other, other_mask = tiny.prompts(5, seed=9)
    keys = row_keys(jax.random.key(2), jnp.arange(5))

    def rows(order, toks=tokens, masks=mask):
        order = np.asarray(order)
        out = tiny.draw(published, toks[order], masks[order], **statics, keys=keys[order])
        return np.asarray(out.tokens[:, 8:]), np.asarray(out.rollout_logprobs)

    whole = rows(range(5))
    for order in ([4, 2, 0, 1, 3], [3]):
        found = rows(order)
        np.testing.assert_array_equal(found[0], whole[0][order])
        np.testing.assert_array_equal(found[1], whole[1][order])
    mixed, mixed_mask = other.copy(), other_mask.copy()
    mixed[2], mixed_mask[2] = tokens[2], mask[2]
    found = rows(range(5), mixed, mixed_mask)
    np.testing.assert_array_equal(found[0][2], whole[0][2])
    np.testing.assert_array_equal(found[1][2], whole[1][2])
    assert (found[0][0] != whole[0][0]).any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_full_softmax_at_the_sampling_temperature(temperature):
    """Against a brute-force float64 softmax over a forward without cache; bound 1e-4 nat in float32."""
    published, statics = setup()
    tokens, mask = tiny.prompts(4)
    sampling = SamplingConfig(max_new_tokens=6, pad_token=0, temperature=temperature)
    out = tiny.draw(published, tokens, mask, **statics, sampling=sampling)
    rows, starts = unpadded(out, mask)
    scaled = np.asarray(logits_after(published.params, rows, **statics), np.float64) / temperature
    shifted = scaled - scaled.max(axis=-1, keepdims=True)
    table = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    for row, start in enumerate(starts):
        for t in range(6):
            expected = table[row, start + t - 1, rows[row, start + t]]
            assert abs(float(out.rollout_logprobs[row, 8 + t]) - expected) < 1e-4


def test_greedy_equals_the_argmax_of_forward():
    published, statics = setup()
    tokens, mask = tiny.prompts(4)
    greedy = SamplingConfig(max_new_tokens=6, pad_token=0, temperature=0.0)
    out = tiny.draw(published, tokens, mask, **statics, sampling=greedy)
    rows, starts = unpadded(out, mask)
    best = np.asarray(logits_after(published.params, rows, **statics)).argmax(axis=-1)
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(out.tokens[row, 8:], best[row, start - 1 : start + 5])


def test_sampled_first_tokens_have_the_model_distribution():
    """Chi-square over 96 tokens from 8,192 rows of one prompt; bound declared beforehand.

    The rarest tokens share one bin. A right sampler exceeds df + 5 sqrt(2 df) + 10
    with probability below 1e-5.
    """
    published, statics = setup()
    tokens, mask = tiny.prompts(1)
    one = SamplingConfig(max_new_tokens=1)
    out = tiny.draw(published, tokens, mask, **statics, sampling=one, group_size=8192)
    logits = np.asarray(
        logits_after(published.params, tokens[0][mask[0]][None], **statics)[0, -1], np.float64
    )
    expected = 8192 * np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    counts = np.bincount(np.asarray(out.tokens[:, 8]), minlength=96).astype(float)
    order = np.argsort(expected)  # pools the rarest tokens until their bin expects 5 draws
    pooled = order[: max(1, int(np.searchsorted(np.cumsum(expected[order]), 5.0)) + 1)]
    expected = np.append(np.delete(expected, pooled), expected[pooled].sum())
    counts = np.append(np.delete(counts, pooled), counts[pooled].sum())
    freedom = len(expected) - 1
    assert freedom > 10
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom) + 10


def test_nothing_compiles_after_the_first_step():
    """Counted with jax's own backend-compile event, over new params, prompts, keys and limits."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    config = tiny.DENSE
    _, side = tiny.sides("qat_w4a4", config)
    masters = tiny.params("dense")
    steps = [
        (masters, *map(jnp.asarray, tiny.prompts(4, seed=step)), step, jax.random.key(step))
        for step in range(4)
    ]

    def step(params, tokens, mask, version, key) -> None:
        published = publish(params, config=config, side=side, version=version)
        out = tiny.draw(
            published, tokens, mask, config=config, side=side, group_size=2,
            keys=row_keys(key, jnp.arange(8)), row_limits=jnp.arange(8, dtype=jnp.int32),
        )  # fmt: skip
        out.tokens.block_until_ready()

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        step(*steps[0])
        assert compiled
        compiled.clear()
        for later in steps[1:]:
            step(*later)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_a_sequence_longer_than_the_model_allows_is_refused():
    published, statics = setup()
    tokens, mask = tiny.prompts(2)
    with pytest.raises(ValueError, match="prompt_width 8 . max_new_tokens 121 = 129 is more .* 128"):
        tiny.draw(published, tokens, mask, **statics, sampling=SamplingConfig(max_new_tokens=121))


def test_versions_do_not_mix():
    """The cache lives inside a call: the same inputs give the same rows before and after another version."""
    published, statics = setup()
    tokens, mask = tiny.prompts(4)
    first = tiny.draw(published, tokens, mask, **statics, sampling=NEVER_STOP)
    moved = jax.tree.map(lambda w: w * 1.5, tiny.params("dense"))
    newer = publish(moved, config=statics["config"], side=statics["side"], version=4)
    other = tiny.draw(newer, tokens, mask, **statics, sampling=NEVER_STOP)
    again = tiny.draw(published, tokens, mask, **statics, sampling=NEVER_STOP)
    assert int(other.params_version) == 4 and (other.tokens != first.tokens).any()
    np.testing.assert_array_equal(again.rollout_logprobs, first.rollout_logprobs)


@pytest.mark.slow
def test_statistics_count_every_real_token_once_and_change_nothing():
    """Tokens that go through the model: a prompt's, once a group, and all of a completion but its last."""
    published, statics = setup(recipe="qat_w4a4")
    tokens, mask = tiny.prompts(3)
    limits = jnp.array([6, 1, 4, 3, 0, 2], jnp.int32)
    plain = tiny.draw(published, tokens, mask, **statics, group_size=2, row_limits=limits)
    out = tiny.draw(published, tokens, mask, **statics, group_size=2, row_limits=limits, stats="on")
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    np.testing.assert_array_equal(out.rollout_logprobs, plain.rollout_logprobs)
    assert plain.stats == {}
    lengths = np.asarray(out.loss_mask).sum(axis=1)
    passed = int(mask.sum() + np.maximum(lengths - 1, 0).sum())
    config = statics["config"]
    for site, size in {"attn/qkv": config.d_model, "mlp/down": config.d_ff}.items():
        act = out.stats[site]["act"]
        assert set(out.stats[site]) == {"act"}  # the weights were counted by publish
        assert int(act["saturation"].count) == passed * size * config.num_layers
        assert 0 < int(act["underflow"].total) < int(act["underflow"].count)


def test_rounds_of_one_step_add_their_statistics():
    published, statics = setup(recipe="qat_w4a4")
    tokens, mask = tiny.prompts(3)
    limits = jnp.array([6, 1, 4, 3, 0, 2], jnp.int32)
    one = jax.device_get(
        tiny.draw(published, tokens, mask, **statics, group_size=2, row_limits=limits, stats="on")
    )
    both = concatenate_rows([one, one])
    assert both.tokens.shape[0] == 12
    for name, sums in one.stats["mlp/down"]["act"].items():
        found = both.stats["mlp/down"]["act"][name]
        assert (float(found.total), float(found.count)) == (2 * float(sums.total), 2 * float(sums.count))
