"""Estimates against numbers worked by hand or by brute force."""

import itertools

import numpy as np
import pytest

from fp4rl_jax.rollout.estimators import (
    bootstrap_mean,
    paired_difference,
    pass_at_k,
    pass_curve,
    wilson,
)


def test_wilson_on_known_numbers():
    # 8 of 10 at 95 %: (0.8 + 1.9208/10 +- 1.96 sqrt(0.16/10 + 3.8416/400)) / (1 + 3.8416/10)
    found = wilson(8, 10)
    assert (round(found.value, 4), round(found.low, 4), round(found.high, 4)) == (
        0.8,
        0.4902,
        0.9433,
    )
    assert wilson(0, 100).low == 0.0 and round(wilson(0, 100).high, 4) == 0.0370
    assert wilson(100, 100).high == 1.0 and round(wilson(100, 100).low, 4) == 0.9630


def test_pass_at_k_equals_counting_every_subset():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([i < c for i in range(n)], k))
                share = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_is_unbiased(rng):
    # E[estimate] over c ~ Binomial(n, p) is 1 - (1 - p)^k exactly; here summed, not sampled
    n, p, k = 8, 0.3, 3
    weights = [
        np.prod([(n - i) / (i + 1) for i in range(c)]) * p**c * (1 - p) ** (n - c) for c in range(n + 1)
    ]
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
    assert mean == pytest.approx(1 - 0.7**3, abs=1e-12)


def test_bootstrap_covers_and_repeats(rng):
    values = rng.normal(0.5, 0.1, 200)
    found = bootstrap_mean(values)
    half = 1.96 * values.std() / np.sqrt(200)
    assert found.value == values.mean()
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert found == bootstrap_mean(values)


def test_paired_difference_is_narrower_than_the_two_apart(rng):
    before = rng.normal(0, 1, 100)
    after = before + 0.1 + rng.normal(0, 0.01, 100)
    found = paired_difference(before, after)
    assert 0.09 < found.low < found.value < found.high < 0.11
    with pytest.raises(ValueError, match=r"\(100,\) and \(99,\)"):
        paired_difference(before, after[1:])


def test_pass_curve_uses_wilson_for_single_samples():
    single = np.array([[True]] * 8 + [[False]] * 2)
    assert pass_curve(single, (1,))[1] == wilson(8, 10)
    four = np.array([[True, True, False, False], [False] * 4])
    curve = pass_curve(four, (1, 2, 4))
    assert [round(curve[k].value, 6) for k in (1, 2, 4)] == [
        0.25,
        round((1 - 1 / 6) / 2, 6),
        0.5,
    ]


@pytest.mark.parametrize("bad", [lambda: wilson(3, 2), lambda: wilson(0, 0), lambda: pass_at_k(4, 2, 5)])
def test_impossible_counts_are_refused(bad):
    with pytest.raises(ValueError, match="got"):
        bad()


def test_a_non_finite_value_is_named():
    with pytest.raises(ValueError, match="problem 1"):
        bootstrap_mean(np.array([0.0, np.nan]))
