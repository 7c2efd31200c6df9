"""Quantized sites: the forms of a weight agree, statistics count what they say, keys reach the sites."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models, ops
from fp4rl_jax.formats import make
from fp4rl_jax.models import stack
from fp4rl_jax.objectives.means import Sums
from fp4rl_jax.ops.spec import MatmulSpec, Side, SideSpec
from fp4rl_jax.quantizers import Quantizer, Stochastic
from tests.models.helpers import ragged_batch
from tests.models.oracle import TINY, random_params

WEIGHT = Quantizer(make("nvfp4", outer="tensor"))
ACT = Quantizer(make("nvfp4", outer="row"))


def side_of(config, *, weight=WEIGHT, act=ACT, dtype="bfloat16", order="fixed") -> Side:
    specs = SideSpec(rules=(("*", MatmulSpec(weight=weight, act=act)),)).resolve(models.sites(config))
    return Side(specs=specs, dtype=dtype, order=order)


def score(config, side, **options):
    return jax.jit(
        partial(
            models.score, prompt_width=5, group_size=2, config=config, side=side, temperature=1.0, **options
        )
    )


@pytest.mark.slow
def test_arrays_packed_weights_and_prepared_operands_agree_bit_for_bit(rng):
    config = TINY["qwen3_moe"]
    side = side_of(config)
    fused = models.fuse(random_params(config, rng))
    tokens, mask = ragged_batch(rng, config, prompts=2, group=2, prompt_width=5, width=3)
    call = score(config, side)
    packed = models.map_sites(lambda _, w: ops.quantize_weight(jnp.asarray(w), WEIGHT), fused)
    expected = call(fused, tokens, mask).logprobs
    np.testing.assert_array_equal(call(packed, tokens, mask).logprobs, expected)
    np.testing.assert_array_equal(call(models.prepare(packed, side), tokens, mask).logprobs, expected)


def test_statistics_count_real_tokens_and_every_weight(rng):
    config = TINY["llama"]
    fused = models.fuse(random_params(config, rng))
    fused["layers"]["mlp"]["down"][0, 0, :16] = 0.0
    tokens, mask = ragged_batch(rng, config, prompts=2, group=2, prompt_width=5, width=3)
    stats = score(config, side_of(config, order="free"), stats="on")(fused, tokens, mask).stats
    assert set(stats) == set(models.sites(config))
    real = int(mask[::2, :5].sum() + mask[:, 5:-1].sum())
    for site, size in {"attn/qkv": 32, "attn/out": 48, "mlp/gate_up": 32, "mlp/down": 48}.items():
        assert int(stats[site]["act"]["saturation"].count) == real * size * config.num_layers
        assert 0.02 < float(stats[site]["act"]["underflow"].mean()) < 0.4
    weights = stats["mlp/down"]["weight"]
    assert int(weights["saturation"].count) == 3 * 32 * 48
    assert int(weights["underflow"].count) == 3 * 32 * 48 - 16
    assert int(weights["zero_scale"].count) == 3 * 32 * 3 - 1


@pytest.mark.slow
def test_sampled_tokens_counted_for_all_layers_at_once_are_those_of_each_layer(rng, monkeypatch):
    """Two pieces of layers; one token in thirteen, the last of them padding."""
    config = TINY["llama"]
    fused = models.fuse(random_params(config, rng))
    tokens, mask = ragged_batch(rng, config, prompts=3, group=2, prompt_width=5, width=8)
    side = side_of(config, order="free")
    found = {}
    for most in (0, ops.stats.MOST_KEPT):
        monkeypatch.setattr(ops.stats, "MOST_KEPT", most)
        call = score(config, side, stats="sampled", trainable_from=1)  # a jit of its own
        found[most] = jax.device_get(call(fused, tokens, mask).stats)
        jax.clear_caches()
    by_layer, at_once = found.values()
    assert set(by_layer) == set(models.sites(config))
    assert jax.tree.structure(by_layer) == jax.tree.structure(at_once)
    for site, operands in by_layer.items():
        for name, ours in operands["act"].items():
            theirs = at_once[site]["act"][name]
            if name == "error":  # sums of squares, in another order: float32 rounding of at most 2^-12 terms
                np.testing.assert_allclose(
                    [ours.total, ours.count], [theirs.total, theirs.count], rtol=2**-12
                )
            else:
                assert (ours.total, ours.count) == (theirs.total, theirs.count)
    assert 0 < float(at_once["mlp/down"]["act"]["underflow"].total)


def test_pieces_of_the_layers_add_what_each_has_counted():
    """Two layers whose weights came prepared, and one that counts its own."""

    def sums(*pairs: tuple[int, int]) -> Sums:
        total, count = (jnp.array(column) for column in zip(*pairs, strict=True))
        return Sums(total.astype(jnp.float32), count.astype(jnp.int32), jnp.zeros(len(pairs)))

    below = {"mlp/down": {"act": sums((2, 8), (1, 8))}, "attn/out": {}}
    above = {"mlp/down": {"act": sums((4, 8)), "weight": sums((3, 9))}, "attn/out": {}}
    total = stack._together([below, above], side_of(TINY["llama"]))
    assert total["attn/out"] == {} and set(total["mlp/down"]) == {"act", "weight"}
    found = {name: (float(s.total), int(s.count)) for name, s in total["mlp/down"].items()}
    assert found == {"act": (7.0, 24), "weight": (3.0, 9)}


@pytest.mark.slow
def test_statistics_leave_values_and_gradients_alone(rng):
    config = TINY["llama"]
    fused = models.fuse(random_params(config, rng))
    tokens, mask = ragged_batch(rng, config, prompts=1, group=2, prompt_width=5, width=3)

    def gradient(stats):
        def loss(fused):
            call = score(config, side_of(config, order="free"), stats=stats, remat="layer", trainable_from=1)
            return jnp.sum(call(fused, tokens, mask).logprobs)

        return jax.grad(loss)(fused)["layers"]["attn"]["qkv"]

    on, off = gradient("on"), gradient("off")
    np.testing.assert_array_equal(on, off)
    assert not np.any(on[0]) and np.all(np.any(on[1:], axis=(1, 2)))


@pytest.mark.slow
def test_a_key_reaches_every_site_and_equal_keys_give_equal_results(rng, key):
    config = TINY["llama"]
    stochastic = Quantizer(make("nvfp4", outer="row"), rounding=Stochastic())
    side = side_of(config, act=stochastic, order="free")
    fused = models.fuse(random_params(config, rng))
    tokens, mask = ragged_batch(rng, config, prompts=1, group=2, prompt_width=5, width=3)
    call = score(config, side)
    one, again = (call(fused, tokens, mask, key=key).logprobs for _ in range(2))
    other = call(fused, tokens, mask, key=jax.random.key(1)).logprobs
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 1e-3


def test_a_kv_quantizer_changes_what_is_attended_to(rng):
    config = TINY["qwen3"]
    side = side_of(config, weight=None, act=None)
    fused = models.fuse(random_params(config, rng))
    tokens = rng.integers(0, config.vocab_size, (2, 6)).astype(np.int32)
    mask = np.ones((2, 6), bool)

    def kv(side):
        call = partial(models.forward, config=config, side=side)
        return jax.jit(call)(
            fused, tokens, positions=models.positions_of(jnp.asarray(mask)), token_mask=mask
        ).kv

    plain, quantized = kv(side), kv(dataclasses.replace(side, kv=ACT))
    expected = ACT.fake_quantize(plain.v[0], axis=-1)
    found = quantized.v.dequantize(plain.v.dtype)
    np.testing.assert_array_equal(found[0], expected)
    assert not np.array_equal(found[1], plain.v[1])
