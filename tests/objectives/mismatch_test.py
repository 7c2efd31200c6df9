"""Every mismatch metric by hand, and at the edges: no token, equal sides, huge gaps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.objectives import mismatch as module
from fp4rl_jax.objectives import mismatch_metrics

LN2 = np.log(2.0)


_jitted = jax.jit(mismatch_metrics, static_argnames="ratio_cap")


def _metrics(p, q, mask, **options):
    return {k: float(v) for k, v in _jitted(jnp.log(p), jnp.log(q), mask, **options).items()}


def _three_tokens(**options):
    """Ratios 2, 1/2 and 1, and a position that is masked out and must not matter."""
    q = jnp.array([[0.2, 0.4], [0.5, 0.9]])
    p = jnp.array([[0.4, 0.2], [0.5, 0.01]])
    return _metrics(p, q, jnp.array([[True, True], [True, False]]), **options)


@pytest.mark.parametrize(
    "key, by_hand",
    [
        ("mismatch_kl", 0.5 / 3),
        ("mismatch_k1", 0.0),
        ("mismatch_k2", LN2**2 / 3),
        ("mismatch_kl_reverse", 0.5 / 3),
        ("mismatch_js", 2 * 0.05889151 / 3),
        ("multiplicative_error", 5 / 3),
        ("logprob_gap_mean", 2 * LN2 / 3),
        ("logprob_gap_max", LN2),
        ("prob_gap_mean", 0.4 / 3),
        ("prob_gap_max", 0.2),
        ("prob_gap_std", 0.09428090),
        ("prob_correlation", 1 / 7),
        ("ratio_mean", 3.5 / 3),
        ("ratio_min", 0.5),
        ("ratio_max", 2.0),
        ("ratio_above_share", 1 / 3),
        ("ratio_below_share", 1 / 3),
        ("ratio_clipped_share", 1 / 3),
        ("effective_sample_size", 7 / 9),
        ("chi2_token", 0.75),
        ("small_gap_share", 1 / 3),
        ("moved_share", 2 / 3),
        ("tail_share", 0.0),
    ],
)
def test_token_metrics_by_hand(key, by_hand):
    assert _three_tokens(ratio_cap=1.9)[key] == pytest.approx(by_hand, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize(
    "key, by_hand",
    [
        ("ppl_gap_mean", 0.0),
        ("ppl_gap_abs_mean", LN2),
        ("ppl_gap_min", -LN2),
        ("ppl_gap_max", LN2),
        ("ppl_ratio", (0.5 + 2.0) / 2),
        ("chi2_sequence", ((16 - 1) + (1 / 4 - 1)) / 2),
    ],
)
def test_sequence_metrics_by_hand(key, by_hand):
    # one sequence of two tokens with ratio 2 each, one of one token with ratio 1/2, one empty
    q, p = jnp.full((3, 2), 0.25), jnp.array([[0.5, 0.5], [0.125, 0.9], [0.9, 0.9]])
    mask = jnp.array([[True, True], [True, False], [False, False]])
    assert _metrics(p, q, mask)[key] == pytest.approx(by_hand, rel=1e-5, abs=1e-6)


def test_the_sign_of_the_perplexity_gap_is_trainer_less_confident():
    metrics = _metrics(jnp.array([[0.1]]), jnp.array([[0.2]]), jnp.array([[True]]))
    assert metrics["ppl_gap_mean"] == pytest.approx(LN2, rel=1e-5) and metrics["mismatch_k1"] > 0


EQUAL = {"ratio_mean", "ratio_min", "ratio_max", "effective_sample_size", "ppl_ratio"} | {
    "multiplicative_error",
    "prob_correlation",
}


def test_no_token_reports_two_equal_sides_and_no_nan():
    logprobs = jnp.full((2, 3), jnp.nan)
    metrics = _jitted(logprobs, logprobs, jnp.zeros((2, 3), bool))
    for key, value in metrics.items():
        assert float(value) == (1.0 if key in EQUAL else 0.0), key


def test_equal_sides_are_exactly_neutral():
    logprobs = jnp.log(jnp.array([[0.1, 0.5, 0.7], [0.3, 0.3, 0.2]]))
    metrics = _jitted(logprobs, logprobs, jnp.array([[True, True, True], [True, False, True]]))
    for key, value in metrics.items():
        expected = 1.0 if key in EQUAL | {"small_gap_share"} else 0.0
        assert float(value) == pytest.approx(expected, abs=1e-6), key


@pytest.mark.parametrize("gap", [60.0, -60.0, 1e4, -1e4])
def test_huge_gaps_keep_clamped_metrics_finite(gap):
    q = jnp.full((1, 4), -1e4)
    metrics = _jitted(q + jnp.array([[gap, 0.0, 0.0, 0.0]]), q, jnp.ones((1, 4), bool))
    unclamped = {"mismatch_kl", "mismatch_kl_reverse", "multiplicative_error"}
    for key, value in metrics.items():
        assert np.isfinite(value) or key in unclamped, key
        assert not np.isnan(value), key
    assert float(metrics["logprob_gap_max"]) == abs(gap)
    assert float(metrics["ratio_max" if gap > 0 else "ratio_min"]) == pytest.approx(np.exp(20 * np.sign(gap)))
    assert float(metrics["effective_sample_size"]) == pytest.approx(0.25 if gap > 0 else 0.75, rel=1e-4)


def test_clipped_share_is_the_corrections_own():
    clipped = jnp.array([[True, False], [True, True]])
    assert _three_tokens(clipped=clipped)["ratio_clipped_share"] == pytest.approx(2 / 3)


def test_tail_and_small_gap_shares():
    q = jnp.zeros((1, 4))
    p = jnp.array([[-6.5, -5.9, 0.009, 0.06]])
    metrics = _jitted(p, q, jnp.ones((1, 4), bool))
    assert float(metrics["tail_share"]) == 0.25
    assert float(metrics["small_gap_share"]) == 0.25
    assert float(metrics["moved_share"]) == 0.75


def test_keys_are_the_documented_ones():
    keys = set(_three_tokens())
    text = module.__doc__ or ""
    abbreviated = {"ppl_gap_abs_mean", "ppl_gap_min", "ppl_gap_max"}
    assert all(f"`{key}`" in text for key in keys - abbreviated)
    assert len(keys) == 29


def test_jit_equals_eager():
    q = jnp.log(jnp.array([[0.2, 0.4], [0.5, 0.9]]))
    mask = jnp.array([[True, True], [True, False]])
    eager, jitted = (f(q + 0.1, q, mask) for f in (mismatch_metrics, _jitted))
    for key in eager:
        np.testing.assert_allclose(float(jitted[key]), float(eager[key]), rtol=2e-5, atol=1e-7)
