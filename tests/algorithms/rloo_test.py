"""RLOO by hand; see conftest for the case."""

import numpy as np
import pytest

from fp4rl_jax.algorithms import rloo


def test_advantages_leave_the_own_reward_out(case):
    batch = rloo.prepare(case.rollouts, case.rewards, rloo.Config())
    np.testing.assert_array_equal(batch.advantages, [1.0, -1.0])


def test_loss_by_hand(case):
    # sums over tokens, no clip: -(1.5 * 1 + 0.5 * 2) + 0.5 * 0.5, two sequences
    loss = case.loss(rloo, rloo.Config())
    assert float(loss.sum) == pytest.approx(-2.25, rel=1e-6) and int(loss.count) == 2
    assert float(loss.metrics["policy_clipped_share"].total) == 0.0


def test_kl_is_summed_over_the_sequence(case):
    plain, with_kl = case.loss(rloo, rloo.Config()), case.loss(rloo, rloo.Config(kl_coef=0.1))
    assert float(with_kl.sum - plain.sum) == pytest.approx(0.1 * case.ref_k3, rel=1e-5)
