"""Publishing: equal codes on both sides, refusals that name the leaf, bytes, versions, no aliasing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.models.params import SITE_PATHS
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.rollout import PublishError, compare_checksums, publish, publish_frozen, weight_checksums
from fp4rl_jax.rollout.checksums import checksum
from tests.rollout import tiny


def is_qtensor(leaf: object) -> bool:
    return isinstance(leaf, QTensor)


@pytest.mark.fast_cases("dense")
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_codes_are_those_of_the_recipes_quantizer_layer_by_layer(name):
    """Every layer (and expert) of a fused site alone gives the published bytes: joint outer scale."""
    config = tiny.CONFIGS[name]
    _, side = tiny.sides("qat_w4a4", config)
    published = publish(tiny.params(name), config=config, side=side, version=1)
    fused = models.fuse(tiny.params(name))
    for site in models.sites(config):
        group, leaf = SITE_PATHS[site]
        weight, q = fused["layers"][group][leaf], published.params["layers"][group][leaf]
        quantize = jax.jit(side.specs[site].weight.quantize)
        for index in np.ndindex(*weight.shape[:-2]):
            alone = quantize(weight[index])
            np.testing.assert_array_equal(alone.packed, q.packed[index])
            np.testing.assert_array_equal(alone.scales, q.scales[index])
            assert float(alone.outer_scale) == float(q.outer_scale[index])


@pytest.mark.fast_cases("dense-qat_w4a16", "dense-quads")
@pytest.mark.parametrize("recipe", tiny.RECIPES)
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_both_sides_hold_the_same_codes(name, recipe):
    config = tiny.CONFIGS[name]
    trainer, side = tiny.sides(recipe, config)
    published = tiny.published(tiny.params(name), config=config, side=side, version=1)
    ours = weight_checksums(tiny.params(name), config=config, side=trainer)
    verdicts = compare_checksums(published.checksums, ours, rollout_side=side, trainer_side=trainer)
    for site, verdict in verdicts.items():
        ours, theirs = trainer.specs[site], side.specs[site]
        same = (ours.weight, ours.smoothing) == (theirs.weight, theirs.smoothing)
        assert (verdict == "equal") == same
    quantized = {site for site in models.sites(config) if side.specs[site].weight is not None}
    assert set(published.checksums) == quantized == set(published.stats)


@pytest.mark.fast_cases("quads")
@pytest.mark.parametrize("recipe", tiny.RECIPES)
def test_what_never_changes_is_published_once_to_the_same_bits(recipe):
    """Embedding and lowest layer frozen: tree, checksums and statistics are those of publishing it whole.

    QUADS chooses columns anew for every version: its stack is left out of the frozen part.
    """
    config = tiny.DENSE
    trainer, side = tiny.sides(recipe, config)
    masters = models.split_layers(tiny.params("dense"), 1)
    parts = {"embed": masters["embed"], "layers": masters["layers"][:1]}
    frozen = publish_frozen(parts, config=config, side=side)
    chooses = any(side.specs[site].needs_calibration for site in models.sites(config))
    assert "embed" in frozen.params and ("layers" in frozen.params) == (not chooses)
    whole, joined = (
        tiny.published(masters, config=config, side=side, version=3, **more)
        for more in ({}, {"frozen": frozen})
    )
    assert (joined.packed_bytes, joined.packed_values) == (whole.packed_bytes, whole.packed_values)
    as_sampled = [
        (models.prepare(found.params, side), found.checksums, found.stats) for found in (joined, whole)
    ]
    jax.tree.map(np.testing.assert_array_equal, *as_sampled)
    below = weight_checksums({"layers": parts["layers"]}, config=config, side=trainer)
    ours = [weight_checksums(masters, config=config, side=trainer, below=x) for x in (None, below)]
    jax.tree.map(np.testing.assert_array_equal, *ours)


def test_one_changed_weight_is_found_and_named():
    config = tiny.DENSE
    trainer, side = tiny.sides("qat_w4a4", config)
    masters = tiny.params("dense")
    published = publish(masters, config=config, side=side, version=1)
    down = masters["layers"]["mlp"]["down"].at[1, 5, 7].multiply(-1.0)
    layers = {**masters["layers"], "mlp": {**masters["layers"]["mlp"], "down": down}}
    ours = weight_checksums({**masters, "layers": layers}, config=config, side=trainer)
    with pytest.raises(PublishError, match=r"mlp/down codes in layers \[1\]"):
        compare_checksums(published.checksums, ours, rollout_side=side, trainer_side=trainer)


def test_checksum_sees_values_and_places(rng):
    codes = rng.integers(0, 256, 4096).astype(np.uint8)
    base = int(checksum(jnp.asarray(codes)))
    for _ in range(50):
        i, j = rng.choice(4096, 2, replace=False)
        moved = codes.copy()
        moved[[i, j]] = moved[[j, i]]
        changed = codes.copy()
        changed[i] ^= np.uint8(1 << rng.integers(8))
        assert int(checksum(jnp.asarray(changed))) != base
        assert codes[i] == codes[j] or int(checksum(jnp.asarray(moved))) != base
    by_hand = 0
    for i, code in enumerate(codes.tolist()):
        place = i * 0x9E3779B1 % 2**32
        by_hand += (code + 1) * ((place ^ place >> 15) * 0x85EBCA77 % 2**32 | 1)
    assert base == by_hand % 2**32


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_weights_are_refused_by_name(bad):
    config = tiny.DENSE
    _, side = tiny.sides("qat_w4a4", config)
    masters = tiny.params("dense")
    attn = {**masters["layers"]["attn"], "k": masters["layers"]["attn"]["k"].at[0, 3, 3].set(bad)}
    broken = {
        **masters,
        "layers": {**masters["layers"], "attn": attn},
        "embed": masters["embed"].at[0].set(bad),
    }
    with pytest.raises(PublishError, match="version 7 is not published: .* embed, layers/attn/k"):
        publish(broken, config=config, side=side, version=7)


def test_bits_per_weight_are_counted_from_the_bytes():
    """NVFP4: 4 bits a code and 8 bits per block of 16, plus one float32 outer scale a layer and site."""
    config = tiny.DENSE
    _, side = tiny.sides("qat_w4a4", config)
    published = publish(tiny.params("dense"), config=config, side=side, version=1)
    d, f, qkv = 64, 96, 64 + 2 * 32
    values = 2 * (qkv * d + d * 64 + 2 * f * d + d * f)
    assert published.packed_values == values
    assert published.packed_bytes == values // 2 + values // 16 + 4 * 2 * 4
    assert published.bits_per_weight == pytest.approx(4.5 + 8 * 32 / values)
    _, plain = tiny.sides("bf16", config)
    assert np.isnan(publish(tiny.params("dense"), config=config, side=plain, version=1).bits_per_weight)


def test_published_leaves_do_not_alias_the_masters():
    """The trainer donates its state to the next update; the sampler's parameters outlive it."""
    config = tiny.DENSE
    _, side = tiny.sides("bf16", config)
    masters = jax.tree.map(jnp.copy, tiny.params("dense"))
    published = publish(masters, config=config, side=side, version=1)
    before = np.asarray(published.params["embed"])
    step = jax.jit(lambda tree: jax.tree.map(lambda w: w + 1, tree), donate_argnums=0)
    step(masters)
    np.testing.assert_array_equal(published.params["embed"], before)


def test_underflow_saturation_and_zero_blocks_are_reported_per_site():
    config = tiny.DENSE
    _, side = tiny.sides("qat_w4a4", config)
    masters = tiny.params("dense")
    out = masters["layers"]["attn"]["out"].at[0, 0, :16].set(1e-12).at[0, 1, :16].set(0.0)
    layers = {**masters["layers"], "attn": {**masters["layers"]["attn"], "out": out}}
    stats = publish({**masters, "layers": layers}, config=config, side=side, version=1).stats
    assert set(stats) == set(models.sites(config))
    zero = stats["attn/out"]["zero_scale"]
    # a block that is far below the tensor's maximum loses its scale; one of zeros has nothing to lose
    assert (float(zero.total), float(zero.count)) == (1.0, 2 * 64 * 64 / 16 - 1)
    assert 0 < float(stats["mlp/down"]["underflow"].total) < float(stats["mlp/down"]["underflow"].count)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unquantized_matrices_take_the_sides_dtype_and_vectors_and_router_stay(dtype):
    config = tiny.MOE
    _, side = tiny.sides("naive_nvfp4", config, dtype=dtype)
    published = publish(tiny.params("moe"), config=config, side=side, version=1).params
    layers = published["layers"]
    assert str(published["embed"].dtype) == dtype
    for leaf in (
        published["final_norm"],
        layers["attn_norm"],
        layers["attn"]["q_norm"],
        layers["moe"]["router"],
    ):
        assert leaf.dtype == jnp.float32
    assert sum(map(is_qtensor, jax.tree.leaves(published, is_leaf=is_qtensor))) == 4
