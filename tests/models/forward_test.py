"""The decoder against an independent float64 one, and against itself by other roads."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.models import rope
from tests.models.helpers import plain_side, ragged_batch
from tests.models.oracle import TINY, random_params, sequence_logits

WIDTH = 9

#: Float32 rounding of a few hundred products and sums on logits of size ~10.
FLOAT32_ERROR = 2e-4


#: Every family, of which only the first belongs to the quick suite where a test compiles much.
ONE_FAST = [pytest.param(name, marks=() if name == "llama" else pytest.mark.slow) for name in TINY]


def run(params, tokens, mask, *, config, order="free", dtype="float32", **options):
    """Jitted `forward` over whole left-padded sequences."""
    call = partial(
        models.forward, config=config, side=plain_side(config, dtype=dtype, order=order), **options
    )
    mask = jnp.asarray(mask)
    return jax.jit(call)(
        models.fuse(params), jnp.asarray(tokens), positions=models.positions_of(mask), token_mask=mask
    )


def logits(params, tokens, mask, *, config):
    """Logits [B, T, V] of whole left-padded sequences."""

    def call(params):
        return models.logits(models.fuse(params), run(params, tokens, mask, config=config).hidden)

    return np.asarray(jax.jit(call)(params))


def left_padded(rng, config, lengths=(WIDTH, 1, 4)):
    tokens = rng.integers(0, config.vocab_size, (len(lengths), WIDTH)).astype(np.int32)
    return tokens, np.arange(WIDTH)[None] >= WIDTH - np.asarray(lengths)[:, None]


@pytest.mark.parametrize("family", list(TINY))
def test_logits_equal_the_float64_oracle(family, rng):
    config = TINY[family]
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)
    found = logits(params, tokens, mask, config=config)
    for row in range(len(tokens)):
        expected = sequence_logits(params, tokens[row][mask[row]], config)
        np.testing.assert_allclose(found[row][mask[row]], expected, rtol=0, atol=FLOAT32_ERROR)


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_a_row_depends_on_no_batch_mate_and_on_no_padding(family, rng):
    config = TINY[family]
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)
    mates, _ = left_padded(rng, config)
    mates[2, mask[2]] = tokens[2, mask[2]]
    call = jax.jit(partial(models.forward, config=config, side=plain_side(config, order="fixed")))
    fused, positions = models.fuse(params), models.positions_of(jnp.asarray(mask))
    first = call(fused, tokens, positions=positions, token_mask=mask).hidden[2]
    second = call(fused, mates, positions=positions, token_mask=mask).hidden[2]
    np.testing.assert_array_equal(first[mask[2]], second[mask[2]])


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_rows_without_any_token_stay_finite(family, rng):
    config = TINY[family]
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)
    mask[1] = False

    def loss(params):
        out = run(params, tokens, mask, config=config)
        return jnp.sum(out.hidden**2), out.hidden

    (_, hidden), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.isfinite(hidden).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("family", ONE_FAST)
def test_groups_equal_prefill_and_block_bit_for_bit(family, rng):
    config, group = TINY[family], 3
    dtype = "bfloat16" if family == "qwen2" else "float32"
    fused = models.fuse(random_params(config, rng))
    tokens, mask = ragged_batch(rng, config, prompts=2, group=group, prompt_width=5, width=4)
    tokens, mask = jnp.asarray(tokens), jnp.asarray(mask)
    side = plain_side(config, dtype=dtype, order="fixed")
    positions = models.positions_of(mask)
    prompts, prompt_mask = tokens[::group, :5], mask[::group, :5]
    call = jax.jit(partial(models.forward, config=config, side=side))
    first = call(fused, prompts, positions=positions[::group, :5], token_mask=prompt_mask)
    second = call(
        fused, tokens[:, 5:], positions=positions[:, 5:], token_mask=mask[:, 5:], prefix=first.kv,
        prefix_mask=prompt_mask,
    )  # fmt: skip
    both = jax.jit(partial(models.forward_groups, config=config, side=side))(
        fused, prompts, tokens[:, 5:], prompt_mask=prompt_mask, completion_mask=mask[:, 5:]
    )
    np.testing.assert_array_equal(both.prompt_hidden, first.hidden[:, -1])
    real = np.asarray(mask[:, 5:])
    np.testing.assert_array_equal(np.asarray(both.hidden)[real], np.asarray(second.hidden)[real])


@pytest.mark.parametrize(
    ("remat", "split"), [pytest.param("none", "stacked", marks=pytest.mark.slow), ("layer", "split")]
)
def test_trainable_from_equals_masking_the_gradient(remat, split, rng):
    config, first = TINY["llama"], 2
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)

    def loss(params, trainable_from):
        tree = models.split_layers(params, first) if split == "split" else params
        options = {"remat": remat, "trainable_from": trainable_from}
        return jnp.sum(run(tree, tokens, mask, config=config, **options).hidden ** 2)

    differentiate = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (full_loss, full), (part_loss, part) = differentiate(params, 0), differentiate(params, first)
    assert float(full_loss) == pytest.approx(float(part_loss), rel=1e-6)
    pairs = zip(jax.tree.leaves(part["layers"]), jax.tree.leaves(full["layers"]), strict=True)
    for found, expected in pairs:
        assert not np.any(found[:first])
        np.testing.assert_allclose(found[first:], expected[first:], rtol=2e-4, atol=2e-4)
    assert not np.any(part["embed"])
    np.testing.assert_allclose(part["final_norm"], full["final_norm"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_frozen_layers_save_nothing_for_the_backward(rng):
    config = dataclasses.replace(TINY["llama"], num_layers=16)
    fused = models.fuse(random_params(config, rng))
    tokens, mask = left_padded(rng, config, lengths=(WIDTH,) * 64)
    positions = models.positions_of(jnp.asarray(mask))

    def saved(trainable_from: int) -> int:
        def loss(fused):
            out = models.forward(
                fused, tokens, config=config, side=plain_side(config), positions=positions, token_mask=mask,
                trainable_from=trainable_from,
            )  # fmt: skip
            return jnp.sum(out.hidden**2)

        analysis = jax.jit(jax.grad(loss)).lower(fused).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert saved(15) < saved(0) / 4


def test_experts_that_get_nothing_and_experts_that_get_all(rng):
    config = TINY["qwen3_moe"]
    params = random_params(config, rng)
    params["embed"][:, 0] = 40.0  # the norm keeps this feature large and positive in every token
    params["layers"]["mlp_norm"][:, 0] = 1.0
    router = params["layers"]["moe"]["router"]
    router[:] *= 0.01
    router[:, :, 0] = np.array([3.0, -3.0, 0.0, 2.0, -1.0])  # every token picks experts 0 and 3
    tokens, mask = left_padded(rng, config)
    found = logits(params, tokens, mask, config=config)
    for row in range(len(tokens)):
        expected = sequence_logits(params, tokens[row][mask[row]], config)
        np.testing.assert_allclose(found[row][mask[row]], expected, rtol=1e-5, atol=FLOAT32_ERROR)


def test_gates_without_normalisation_are_the_softmax(rng):
    config = dataclasses.replace(TINY["qwen3_moe"], norm_topk=False)
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)
    found = logits(params, tokens, mask, config=config)
    expected = sequence_logits(params, tokens[0], config)
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=FLOAT32_ERROR)


def test_bfloat16_activations_stay_near_the_oracle(rng):
    config = TINY["qwen2"]
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)
    out = run(params, tokens, mask, config=config, dtype="bfloat16")
    assert out.hidden.dtype == out.kv.k.dtype == jnp.bfloat16
    found = np.asarray(models.logits(models.fuse(params), out.hidden))
    assert found.dtype == np.float32
    expected = sequence_logits(params, tokens[0], config)
    assert np.abs(found[0] - expected).max() < 0.05 * np.abs(expected).max()


def test_rope_scaling_of_llama3():
    scaling = models.RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192
    )
    config = models.ModelConfig(head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
    plain = models.ModelConfig(head_dim=64, rope_theta=500000.0)
    found, base = rope.inverse_frequencies(config), rope.inverse_frequencies(plain)
    wavelengths = 2 * np.pi / base
    np.testing.assert_array_equal(found[wavelengths < 2048], base[wavelengths < 2048])
    np.testing.assert_allclose(found[wavelengths > 8192], base[wavelengths > 8192] / 8, rtol=1e-6)
    middle = (wavelengths >= 2048) & (wavelengths <= 8192)
    smooth = (8192 / wavelengths[middle] - 1) / 3
    np.testing.assert_allclose(found[middle], base[middle] * (smooth + (1 - smooth) / 8), rtol=1e-5)
    assert middle.sum() == 3


def test_lengths_and_missing_halves_are_refused(rng):
    config = dataclasses.replace(TINY["llama"], max_length=8)
    params = random_params(config, rng)
    tokens, mask = left_padded(rng, config)
    with pytest.raises(ValueError, match="9 columns exceed the model's max_length of 8"):
        run(params, tokens, mask, config=config)
    with pytest.raises(ValueError, match="prefix_mask is missing"):
        run(params, tokens, mask, config=config, prefix=models.KV(k=jnp.zeros(1), v=jnp.zeros(1)))
    with pytest.raises(ValueError, match=r"trainable_from must be in 0..3 layers, got 4"):
        run(params, tokens, mask, config=dataclasses.replace(config, max_length=9), trainable_from=4)
