"""Advantages by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.objectives import advantages

REWARDS = jnp.array([1.0, 0.0, 0.0, 0.0, 2.0, 4.0, 6.0, 8.0])


def test_group_centered_by_hand():
    centered = advantages.group_centered(REWARDS, group_size=4)
    np.testing.assert_array_equal(centered, [0.75, -0.25, -0.25, -0.25, -3.0, -1.0, 1.0, 3.0])


def test_group_normalized_by_hand_with_the_population_deviation():
    normalized = advantages.group_normalized(REWARDS, group_size=4, eps=0.0)
    first = np.array([3.0, -1.0, -1.0, -1.0]) / np.sqrt(3.0)  # std = sqrt(3) / 4
    second = np.array([-3.0, -1.0, 1.0, 3.0]) / np.sqrt(5.0)
    np.testing.assert_allclose(normalized, np.concatenate([first, second]), rtol=1e-6)


def test_eps_is_added_to_the_deviation():
    normalized = advantages.group_normalized(jnp.array([0.0, 1.0]), group_size=2, eps=0.5)
    np.testing.assert_allclose(normalized, [-0.5, 0.5], rtol=1e-6)  # 0.5 / (0.5 + 0.5)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("reward", [0.0, 0.1, -0.7, 1e6 / 3])
def test_equal_rewards_give_exactly_zero(group, reward):
    rewards = jnp.full(2 * group, reward)
    for values in (
        advantages.group_centered(rewards, group_size=group),
        advantages.group_normalized(rewards, group_size=group, eps=1e-6),
        advantages.batch_normalized(rewards, jnp.arange(1, 2 * group + 1), eps=1e-6),
    ):
        np.testing.assert_array_equal(values, np.zeros(2 * group))


def test_leave_one_out_by_hand():
    found = advantages.leave_one_out(jnp.array([1.0, 2.0, 6.0]), group_size=3)
    np.testing.assert_allclose(found, [1 - 4, 2 - 3.5, 6 - 1.5], rtol=1e-6)


def test_leave_one_out_refuses_groups_of_one():
    with pytest.raises(ValueError, match="group_size >= 2, got 1"):
        advantages.leave_one_out(jnp.array([1.0]), group_size=1)


def test_batch_normalized_counts_every_token_once():
    # two tokens with reward 1, one with reward 0: mean 2/3, variance 2/9; the empty row is ignored
    found = advantages.batch_normalized(jnp.array([1.0, 0.0, 99.0]), jnp.array([2, 1, 0]), eps=0.0)
    np.testing.assert_allclose(found, [np.sqrt(0.5), -np.sqrt(2.0), 0.0], rtol=1e-6)


def test_batch_normalized_without_a_token_is_zero():
    found = advantages.batch_normalized(jnp.array([1.0, 0.0]), jnp.array([0, 0]), eps=1e-6)
    np.testing.assert_array_equal(found, [0.0, 0.0])


def test_mixed_groups():
    found = advantages.mixed_groups(jnp.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
    np.testing.assert_array_equal(found, [True, False, False])


def test_overlong_penalty_by_hand():
    # L_max 20, L_cache 4: 0 up to 16, then a quarter a token
    lengths = jnp.array([0, 15, 16, 17, 19, 20, 25])
    found = advantages.overlong_penalty(lengths, max_length=20, cache=4)
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.0, -0.25, -0.75, -1.0, -1.0])


@pytest.mark.parametrize("cache", [0, -1, 21])
def test_overlong_cache_must_fit(cache):
    with pytest.raises(ValueError, match=f"cache is {cache} tokens"):
        advantages.overlong_penalty(jnp.array([1]), max_length=20, cache=cache)


def test_rewards_that_form_no_groups_are_refused():
    with pytest.raises(ValueError, match="8 rewards do not form groups of group_size=3"):
        advantages.group_centered(REWARDS, group_size=3)
