"""GRPO by hand; see conftest for the case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.algorithms import grpo


def test_loss_by_hand(case):
    # A = (1, -1); row 0: mean(-1.2 * 1, -0.5 * 2) = -1.1; row 1: 0.8 * 0.5 = 0.4
    loss = case.loss(grpo, grpo.Config(std_eps=1e-9))
    assert float(loss.sum) == pytest.approx(-0.7, rel=1e-6) and int(loss.count) == 2
    assert float(loss.metrics["loss"].mean()) == pytest.approx(-0.35, rel=1e-6)
    assert float(loss.metrics["policy_ratio"].mean()) == pytest.approx(2.5 / 3, rel=1e-6)
    assert float(loss.metrics["policy_clipped_share"].mean()) == pytest.approx(2 / 3, rel=1e-6)
    assert float(loss.metrics["ref_kl"].mean()) == pytest.approx(case.ref_k3 / 3, rel=1e-5)


def test_kl_term_by_hand_is_not_weighted(case):
    # the first token's k3, a half of its row, times 0.1; its correction weight does not apply
    plain = case.loss(grpo, grpo.Config())
    with_kl = case.loss(grpo, grpo.Config(kl_coef=0.1))
    assert float(with_kl.sum - plain.sum) == pytest.approx(0.1 * case.ref_k3 / 2, rel=1e-5)


def test_first_update_has_value_by_advantage_alone_and_a_gradient(case):
    # ratio 1: row 0: -(1 + 2) / 2, row 1: +0.5
    loss = case.loss(grpo, grpo.Config(std_eps=1e-9), old="none")
    assert float(loss.sum) == pytest.approx(-1.0, rel=1e-6)
    assert float(loss.metrics["policy_clipped_share"].total) == 0.0


def test_gradient_by_hand(case):
    batch = grpo.prepare(case.rollouts, case.rewards, grpo.Config(std_eps=1e-9))
    batch = batch.replace(old_logprobs=case.old_logprobs)
    grad = jax.grad(lambda lp: grpo.loss(lp, batch, case.weights, grpo.Config()).sum)(case.trainer_logprobs)
    # only the second token of row 0 is inside the clip: -ratio * A * w / 2
    np.testing.assert_allclose(grad, [[0, 0, -0.5], [0, 0, 0]], rtol=1e-6)


def test_eps_is_added_to_the_standard_deviation(case):
    batch = grpo.prepare(case.rollouts, case.rewards, grpo.Config(std_eps=0.5))
    np.testing.assert_allclose(batch.advantages, [0.5, -0.5], rtol=1e-6)


@pytest.mark.parametrize(
    "field, value", [("clip_low", 0.0), ("clip_high", -0.1), ("std_eps", 0.0), ("kl_coef", float("nan"))]
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        grpo.Config(**{field: value})


def test_rewards_of_another_length_are_refused(case):
    with pytest.raises(AssertionError):
        grpo.prepare(case.rollouts, jnp.array([1.0]), grpo.Config())
