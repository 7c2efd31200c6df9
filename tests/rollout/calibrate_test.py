"""Calibration: what is seen, how it runs on, what publish makes of it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models, ops
from fp4rl_jax.models.params import SITE_PATHS
from fp4rl_jax.quantizers.residual import ChannelStats
from fp4rl_jax.rollout import PublishError, calibrate, publish
from tests.rollout import tiny

CONFIG = tiny.DENSE


@pytest.fixture(scope="module")
def side():
    return tiny.sides("quads", CONFIG)[1]


@pytest.fixture(scope="module")
def first(side):
    """The first calibration, and one of the same prompts with other tokens in the padding."""
    tokens, mask = map(jnp.asarray, tiny.prompts(4))
    other = jnp.where(mask, tokens, 7)
    found = [
        calibrate.first(tiny.params("dense"), t, mask, config=CONFIG, side=side) for t in (tokens, other)
    ]
    return jax.device_get(found)


def test_every_site_and_layer_is_seen_and_padding_is_not(first, side):
    """The checkpoint's template has the calibration's own shapes; every statistic is above zero."""
    found, other = first
    shapes = jax.tree.map(jnp.shape, calibrate.empty(CONFIG, side))
    assert jax.tree.map(np.shape, found) == shapes
    assert set(found) == set(models.sites(CONFIG)) and found["mlp/down"].energy.shape == (2, 96)
    for leaf, same in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, same)
        assert np.all(leaf >= 0) and leaf.max() > 0
    for stats in found.values():
        assert np.all(stats.energy <= stats.residual_max**2 * (1 + 1e-6))


def test_statistics_run_on_by_hand(side):
    old = {"mlp/down": ChannelStats(*(jnp.full((2, 96), v) for v in (8.0, 4.0, 2.0)))}
    seen = {"mlp/down": ChannelStats(*(jnp.zeros((2, 96)) for _ in range(3)))}
    new = calibrate.renewed(old, seen, side=side)["mlp/down"]  # decay 1/2
    assert [float(leaf[0, 0]) for leaf in (new.energy, new.residual_max, new.act_max)] == [4.0, 2.0, 1.0]


def test_publish_takes_the_loudest_blocks_and_changes_no_byte(first, side):
    """Half of four blocks a layer, by energy; codes and scales are those of the uncorrected weight."""
    energy = np.ones((2, 64), np.float32)
    energy[0, 16:32], energy[0, 48:], energy[1, :32] = 5.0, 9.0, 2.0
    loud = jnp.asarray(energy)
    calibration = {**first[0], "attn/qkv": ChannelStats(energy=loud, residual_max=loud, act_max=loud)}
    params = tiny.params("dense")
    ours = publish(params, config=CONFIG, side=side, version=1, calibration=calibration)
    group, leaf = SITE_PATHS["attn/qkv"]
    weight = ours.params["layers"][group][leaf]
    np.testing.assert_array_equal(weight.columns[0], [*range(16, 32), *range(48, 64)])
    np.testing.assert_array_equal(weight.columns[1], np.arange(32))
    plain = publish(params, config=CONFIG, side=tiny.sides("qat_w4a4", CONFIG)[1], version=1)
    for site, parts in plain.checksums.items():
        for name, value in parts.items():
            np.testing.assert_array_equal(ours.checksums[site][name], value)
    assert ours.packed_bytes == plain.packed_bytes


def test_smoothing_is_made_anew_of_the_last_rollouts_at_every_publish():
    """SmoothQuant has no running statistics: a version's factors are of what the one before it saw."""
    side = tiny.sides("baseline_w4a4", CONFIG)[1]
    params = tiny.params("dense")
    tokens, mask = map(jnp.asarray, tiny.prompts(4))
    group, leaf = SITE_PATHS["mlp/down"]

    def smoothing(published):
        return np.asarray(published.params["layers"][group][leaf].smoothing)

    start = calibrate.first(params, tokens, mask, config=CONFIG, side=side)
    first = publish(params, config=CONFIG, side=side, version=0, calibration=start)
    seen, _ = calibrate.observe(first, (tokens + 11) % CONFIG.vocab_size, mask, config=CONFIG, side=side)
    new = calibrate.renewed(start, seen, side=side)
    chex.assert_trees_all_equal(new, seen)
    second = publish(params, config=CONFIG, side=side, version=1, calibration=new)
    assert not np.array_equal(smoothing(first), smoothing(second))
    fused = models.fuse(params)["layers"][group][leaf]
    for layer in range(CONFIG.num_layers):
        expected = ops.operands.smoothing_of(fused[layer], seen["mlp/down"].act_max[layer], alpha=0.5)
        # two powers and a quotient, each within an ulp in whatever program they are
        np.testing.assert_allclose(smoothing(second)[layer], expected, rtol=2**-21)


def test_without_a_calibration_nothing_is_published(side):
    with pytest.raises(PublishError, match="attn/out, attn/qkv, mlp/down, mlp/gate_up: columns, smoothing"):
        publish(tiny.params("dense"), config=CONFIG, side=side, version=1)


def test_sides_that_need_nothing_are_not_looked_at():
    plain = tiny.sides("qat_w4a4", CONFIG)[1]
    assert not calibrate.is_needed(plain) and not calibrate.is_observed(plain)
    resq = tiny.sides("rollout_resq", CONFIG)[1]
    assert not calibrate.is_needed(resq) and calibrate.is_observed(resq)
    ones = jnp.ones((1, 2), jnp.int32)
    assert calibrate.first(tiny.params("dense"), ones, ones > 0, config=CONFIG, side=resq) == {}
