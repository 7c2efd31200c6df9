"""DAPO by hand; see conftest for the case."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.algorithms import dapo

UNSHAPED = dapo.Config(overlong_coef=0.0, std_eps=1e-9)


def test_defaults_are_the_papers():
    config = dapo.Config()
    assert (config.clip_low, config.clip_high, config.kl_coef) == (0.2, 0.28, 0.0)
    assert config.overlong_share == 4096 / 20480


def test_loss_by_hand(case):
    # A = (1, -1), clip-higher 1.28, mean over tokens: -1.28 * 1 - 0.5 * 2 + 0.8 * 0.5
    loss = case.loss(dapo, UNSHAPED)
    assert float(loss.sum) == pytest.approx(-1.88, rel=1e-6) and int(loss.count) == 3


def test_overlong_shaping_by_hand(case):
    # L_max 2, L_cache 1: the completion of 2 tokens loses 1, that of 1 token nothing
    config = dapo.Config(overlong_share=0.5, std_eps=1e-9)
    equal = dapo.prepare(case.rollouts, case.rewards, config)
    np.testing.assert_array_equal(equal.advantages, [0.0, 0.0])
    swapped = dapo.prepare(case.rollouts, jnp.array([0.0, 0.0]), config)
    np.testing.assert_allclose(swapped.advantages, [-1.0, 1.0], rtol=1e-6)
    halved = dapo.prepare(
        case.rollouts, case.rewards, dapo.Config(overlong_share=0.5, overlong_coef=0.5, std_eps=0.25)
    )
    np.testing.assert_allclose(halved.advantages, [0.5, -0.5], rtol=1e-6)  # 0.25 / (0.25 + 0.25)


def test_dynamic_sampling_drops_groups_without_contrast():
    rewards = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], np.float32)
    np.testing.assert_array_equal(dapo.wanted(rewards, dapo.Config()), [True, False, False])
    np.testing.assert_array_equal(dapo.wanted(rewards, dapo.Config(dynamic_sampling="off")), [True] * 3)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_overlong_share_must_fit(share):
    with pytest.raises(ValueError, match=f"overlong_share is {share}"):
        dapo.Config(overlong_share=share)
