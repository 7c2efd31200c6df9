"""TRIAGE by hand: segments and their edges, exact thresholds, both scopes, all reductions, metrics."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.objectives import triage
from fp4rl_jax.objectives.means import Weighting, weighted_sum
from fp4rl_jax.objectives.triage import GateConfig, RepairConfig

Q3 = GateConfig(scope="q3", segment=4)
TAU, BETA2 = -0.03, 0.0005


_gate_weights = jax.jit(triage.gate_weights, static_argnames=("config", "start"))
_repair = jax.jit(triage.repair, static_argnames="config")


def gate(delta, advantages, mask=None, config=Q3, start=0):
    delta = jnp.asarray(delta, jnp.float32)
    mask = jnp.ones(delta.shape, bool) if mask is None else jnp.asarray(mask)
    clean = triage.delta_of(delta, jnp.zeros_like(delta), mask)
    return np.asarray(_gate_weights(clean, jnp.asarray(advantages), mask, config=config, start=start))


def f32(*values):
    return np.asarray(values, np.float32)


def test_the_defaults_are_off_and_the_published_numbers():
    assert triage.TriageConfig().gate.scope == triage.TriageConfig().repair.scope == "off"
    config = GateConfig()
    assert (config.segment, config.mild, config.strong, config.tail, config.tail_count) == (
        64,
        -0.5,
        -1.5,
        -6.0,
        2,
    )
    assert (config.mild_weight, config.strong_weight, config.tail_weight) == (0.3, 0.1, 0.1)
    assert dataclasses.astuple(RepairConfig()) == ("off", 0.015, 128, -0.03, 0.0005)
    assert math.sqrt(RepairConfig().beta_squared) == pytest.approx(0.02236, rel=1e-4)
    np.testing.assert_array_equal(gate([[-9.0, -9.0]], [-1.0], config=GateConfig()), [[1, 1]])


@pytest.mark.parametrize(
    "mean, weight",
    [
        (-0.25, 1.0),
        (-0.5, 1.0),  # the threshold itself is not below it
        (float(np.nextafter(np.float32(-0.5), np.float32(-1))), 0.3),
        (-1.0, 0.3),
        (-1.5, 0.3),
        (float(np.nextafter(np.float32(-1.5), np.float32(-2))), 0.1),
        (-3.0, 0.1),
    ],
)
def test_the_mean_decides_at_exact_thresholds(mean, weight):
    for tokens in (1, 2, 4):  # one token, a short segment, a full one: the mean is exact in each
        mask = np.arange(4) < tokens
        found = gate([[mean] * 4], [-1.0], [mask])
        np.testing.assert_array_equal(found[0], np.where(mask, np.float32(weight), 1))


@pytest.mark.parametrize("count, weight", [(0, 1.0), (1, 0.55), (2, 0.1), (3, 0.1)])
def test_the_tail_counts_tokens_below_minus_six(count, weight):
    # every far token is balanced by one as far above, so that the mean is 0 and says 1; -6 is not below -6
    wide = dataclasses.replace(Q3, segment=8)
    delta = [[-6.5] * count + [6.5] * count + ([-6.0, 6.0] + [0.0] * 4)[: 8 - 2 * count]]
    found = gate(delta, [-2.0], config=wide)
    np.testing.assert_array_equal(found[0], np.where(np.array(delta[0]) < 0, np.float32(weight), 1))


def test_the_smaller_of_both_weights_is_taken():
    np.testing.assert_array_equal(gate([[-6.5, 5.9, 0.0, 0.0]], [-1.0])[0], f32(0.55, 1, 1, 1))
    np.testing.assert_array_equal(gate([[-6.5, 4.0, 0.0, 0.0]], [-1.0])[0], f32(0.3, 1, 1, 1))
    np.testing.assert_array_equal(gate([[-6.5, 0.25, 0.0, 0.0]], [-1.0])[0], f32(0.1, 1, 1, 1))


def test_segments_start_at_the_completion_keep_the_short_tail_and_skip_masked_tokens():
    x = -7.0  # what stands on masked positions and must not matter
    delta = [[x, x, -1.0, x, -1.0, 0.2, -0.2, x, x, x, -2.0]]
    mask = [[False, False, True, False, True, True, True, False, False, False, True]]
    # start 2: segment 1 = columns 2..5, mean (-1 - 1 + 0.2) / 3 = -0.6; 2 = columns 6..9, one token of -0.2;
    # 3 = column 10 alone, mean -2
    found = gate(delta, [-1.0], mask, start=2)
    np.testing.assert_array_equal(found[0], f32(1, 1, 0.3, 1, 0.3, 1, 1, 1, 1, 1, 0.1))


def test_only_segments_of_negative_mean_advantage_are_eligible():
    delta = [[-1.0] * 8] * 4
    advantages = np.array([[-1, -1, -1, 2.5, -1, 2, 1, -1], [-1] * 8, [0] * 8, [1] * 8], np.float32)
    found = gate(delta, advantages)  # mean advantages: row 0 has -0.125 and +0.25
    np.testing.assert_array_equal(found[0], f32(*[0.3] * 4, *[1] * 4))
    np.testing.assert_array_equal(found[1:], [f32(*[0.3] * 8), np.ones(8), np.ones(8)])


def test_the_scope_segment_weighs_every_token_of_the_segment():
    delta, config = [[-4.0, 1.0, 0.0, -1.0]], dataclasses.replace(Q3, scope="segment")
    np.testing.assert_array_equal(gate(delta, [-1.0])[0], f32(0.3, 1, 1, 0.3))
    np.testing.assert_array_equal(gate(delta, [-1.0], config=config)[0], f32(0.3, 0.3, 0.3, 0.3))
    masked = gate(delta, [-1.0], [[True, False, True, True]], config=config)
    np.testing.assert_array_equal(masked[0], f32(0.1, 1, 0.1, 0.1))  # mean -5/3


def test_nothing_on_the_mask_gives_ones_and_no_segment():
    nan = np.full((2, 6), np.nan, np.float32)
    mask = np.zeros((2, 6), bool)
    np.testing.assert_array_equal(gate(nan, [-1.0, 1.0], mask), np.ones((2, 6)))
    delta = triage.delta_of(jnp.asarray(nan), jnp.asarray(nan), jnp.asarray(mask))
    found = triage.repair(delta, jnp.ones(2), jnp.asarray(mask), RepairConfig(scope="all", segment=4))
    assert (float(found["repair"].total), int(found["repair"].count)) == (0.0, 0)
    metrics = triage.asymmetry_metrics(delta, jnp.ones(2), jnp.asarray(mask))
    assert {k: float(v) for k, v in metrics.items()} == {k: float(k == "asymmetry_ratio") for k in metrics}


def test_the_weights_are_detached():
    config = dataclasses.replace(Q3, tail_count=3)
    slope = jax.grad(
        lambda d: jnp.sum(triage.gate_weights(d, -jnp.ones(1), jnp.ones((1, 4), bool), config) * d)
    )(f32([-1.0, -1.0, -1.0, 2.0])[0][None])
    np.testing.assert_array_equal(slope, gate([[-1.0, -1.0, -1.0, 2.0]], [-1.0], config=config))


def phi(q):
    return BETA2 * (math.sqrt(1 + q * q / BETA2) - 1)


REPAIR = RepairConfig(scope="adv_positive", segment=4)
#: By segment of 4: row 0 (A > 0): mean -0.53; mean -0.03 + tiny (a short tail of one, at the threshold);
#: row 1 (A < 0): mean -1; nothing on the mask; row 2 (A > 0): +0.5; mean -0.08 over two tokens.
DELTA = f32([-1.0, -0.5, -0.5, -0.12, TAU], [-1.0, -1, -1, -1, 0], [0.5, 0.5, 0.5, 0.5, -0.08])
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool)
ADVANTAGES = f32(1.0, -1.0, 0.5)


def repair(delta, config=REPAIR):
    clean = triage.delta_of(jnp.asarray(delta), jnp.zeros_like(delta), jnp.asarray(MASK))
    return _repair(clean, jnp.asarray(ADVANTAGES), jnp.asarray(MASK), config=config)


def test_repair_by_hand():
    found = repair(DELTA)
    assert int(found["repair"].count) == 5  # all valid segments, selected or not
    by_hand = phi(0.53 - 0.03) + phi(0.08 - 0.03)  # the segment at the threshold adds nothing
    assert float(found["repair"].total) == pytest.approx(by_hand, rel=1e-5)
    assert float(found["repair_share"].mean()) == pytest.approx(2 / 5)
    everything = repair(DELTA, dataclasses.replace(REPAIR, scope="all"))
    assert float(everything["repair"].total) == pytest.approx(by_hand + phi(0.97), rel=1e-5)
    assert int(everything["repair"].count) == 5
    assert int(triage.num_segments(jnp.asarray(MASK), REPAIR)) == 5


def test_the_slope_of_repair_is_spread_over_the_segments_tokens_and_bounded():
    slope = np.asarray(jax.grad(lambda d: repair(d)["repair"].total)(jnp.asarray(DELTA)))
    steep = -0.5 / math.sqrt(1 + 0.25 / BETA2)  # d phi / d mean
    mild = -0.05 / math.sqrt(1 + 0.0025 / BETA2)
    want = np.zeros_like(DELTA)
    want[0, :4], want[2, 4] = steep / 4, mild
    np.testing.assert_allclose(slope, want, rtol=2e-5)
    assert abs(steep) < math.sqrt(BETA2)


def test_phi_keeps_its_digits_near_zero():
    for q in (0.0, 1e-6, 1e-3, 0.02, 0.5, 100.0):
        exact = BETA2 * math.expm1(0.5 * math.log1p(q * q / BETA2))
        assert float(triage.pseudo_huber(jnp.float32(q), BETA2)) == pytest.approx(exact, rel=1e-6)


def test_reductions_by_hand():
    values, mask = f32([1, 2, 9], [4, 9, 9]), np.array([[1, 1, 0], [1, 0, 0]], bool)
    weights = f32([1, 0.5, 1], [0.1, 1, 1])
    whole, rows = (
        weighted_sum(
            jnp.asarray(values), jnp.asarray(mask), Weighting(weights=jnp.asarray(weights), reduction=name)
        )
        for name in ("update", "response")
    )
    assert float(whole.mean()) == pytest.approx((1 + 1 + 0.4) / 1.6, rel=1e-6)
    assert float(rows.mean()) == pytest.approx((2 / 1.5 + 4) / 2, rel=1e-6) and int(rows.count) == 2
    tiny = weighted_sum(jnp.asarray(values), jnp.asarray(mask), Weighting(weights=jnp.full((2, 3), 0.1)))
    assert float(tiny.mean()) == pytest.approx(7 / 3, rel=1e-6)  # a denominator of 0.3 is no 1


def test_asymmetry_by_hand():
    delta = f32([0.5, -0.25, 0.0, -7.0], [0.125, -1.0, -2.0, 3.0])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    clean = triage.delta_of(jnp.asarray(delta), jnp.zeros((2, 4)), jnp.asarray(mask))
    found = triage.asymmetry_metrics(clean, f32(2.0, -3.0), jnp.asarray(mask))
    want = {"q1": 0.5 / 7, "q4": 0.25 / 7, "q2": 3.125 / 7, "q3": 3.0 / 7}
    for name, mass in want.items():
        assert float(found[f"quadrant_mass/{name}"]) == pytest.approx(mass, rel=1e-6)
    assert float(found["asymmetry_ratio"]) == pytest.approx(2 * 3.0 / (1 * 2.0))
    assert float(found["tail_count"]) == 0.0
    far = triage.asymmetry_metrics(jnp.full((1, 3), -6.5), f32(-1.0), jnp.array([[True, True, False]]))
    assert float(found["tail_count"]) == 0.0 and float(far["tail_count"]) == 2.0
    assert np.isinf(float(far["asymmetry_ratio"]))  # nothing to compare with is not hidden


def test_values_that_cannot_be_meant_are_refused_by_key():
    for config, change, message in (
        (GateConfig, {"segment": 0}, "triage.gate.segment is 0"),
        (GateConfig, {"mild_weight": 0.0}, "triage.gate.mild_weight is 0.0"),
        (GateConfig, {"strong": 0.0}, "triage.gate.strong is 0.0, expected at most mild"),
        (GateConfig, {"scope": "q4"}, "scope"),
        (GateConfig, {"tail": math.inf}, "triage.gate.tail is inf, expected a finite number"),
        (GateConfig, {"mild": math.nan}, "triage.gate.mild is nan"),
        (RepairConfig, {"threshold": math.nan}, "triage.repair.threshold is nan"),
        (RepairConfig, {"coef": -1.0}, "triage.repair.coef is -1.0"),
        (RepairConfig, {"scope": "on"}, "scope"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**change)
    with pytest.raises(ValueError, match="column 4"):
        triage.cut(jnp.zeros((1, 4)), size=2, start=4)
