"""REINFORCE++ by hand; see conftest for the case."""

import numpy as np
import pytest

from fp4rl_jax.algorithms import reinforce_pp

EXACT = reinforce_pp.Config(std_eps=1e-9)


def test_advantages_are_normalised_over_the_tokens_of_the_batch(case):
    batch = reinforce_pp.prepare(case.rollouts, case.rewards, EXACT)
    np.testing.assert_allclose(batch.advantages, [np.sqrt(0.5), -np.sqrt(2.0)], rtol=1e-6)


def test_loss_by_hand(case):
    # (-1.2 - 0.5 * 2) * sqrt(1/2) + 0.8 * 0.5 * sqrt(2), mean over 3 tokens
    loss = case.loss(reinforce_pp, EXACT)
    assert float(loss.sum) == pytest.approx(-2.2 * np.sqrt(0.5) + 0.4 * np.sqrt(2), rel=1e-6)
    assert int(loss.count) == 3


def test_kl_in_the_reward_by_hand(case):
    # log(0.2 / 0.6) + log(0.4 / 0.2) = ln(2/3) on row 0, ln 2 on row 1; with k = 1 / ln(3/2) ...
    k = 1 / np.log(1.5)
    config = reinforce_pp.Config(std_eps=1e-9, reward_kl_coef=k)
    batch = reinforce_pp.prepare(case.rollouts, case.rewards, config, ref_logprobs=case.ref_logprobs)
    shaped = np.array([1 + 1, 0 - np.log(2) * k])
    mean = (2 * shaped[0] + shaped[1]) / 3
    spread = np.sqrt((2 * (shaped[0] - mean) ** 2 + (shaped[1] - mean) ** 2) / 3)
    np.testing.assert_allclose(batch.advantages, (shaped - mean) / spread, rtol=1e-5)


def test_kl_in_the_reward_needs_the_reference(case):
    assert reinforce_pp.Config(reward_kl_coef=0.1).needs_reference
    with pytest.raises(ValueError, match="ref_logprobs"):
        reinforce_pp.prepare(case.rollouts, case.rewards, reinforce_pp.Config(reward_kl_coef=0.1))


def test_groups_of_one_work(case):
    rollouts = case.rollouts.replace(group_size=1)
    reinforce_pp.validate(EXACT, group_size=1)
    batch = reinforce_pp.prepare(rollouts, case.rewards, EXACT)
    np.testing.assert_allclose(batch.advantages, [np.sqrt(0.5), -np.sqrt(2.0)], rtol=1e-6)
