"""Dr.GRPO by hand; see conftest for the case."""

import numpy as np
import pytest

from fp4rl_jax.algorithms import dr_grpo


def test_advantages_are_not_divided_by_the_deviation(case):
    batch = dr_grpo.prepare(case.rollouts, 4 * case.rewards, dr_grpo.Config())
    np.testing.assert_array_equal(batch.advantages, [2.0, -2.0])


@pytest.mark.parametrize("length, expected", [(None, -0.45), (2, -0.45), (8, -0.1125)])
def test_loss_by_hand(case, length, expected):
    # A = (1/2, -1/2); (-1.2 - 0.5 * 2) / 2 / L + 0.8 * 0.5 / 2 / L, with L = 2 completion columns
    loss = case.loss(dr_grpo, dr_grpo.Config(length=length))
    assert float(loss.sum) == pytest.approx(expected, rel=1e-6) and int(loss.count) == 2


def test_length_must_be_positive():
    with pytest.raises(ValueError, match="length is 0"):
        dr_grpo.Config(length=0)
