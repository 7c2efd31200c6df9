"""GSPO by hand; see conftest for the case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.algorithms import gspo

EXACT = gspo.Config(std_eps=1e-9)


def test_loss_by_hand(case):
    # row 0: s = sqrt(3/2 * 1/2), not clipped from below as A > 0: -s * mean(1, 2)
    # row 1: s = 1/2 with A < 0 is held at 1 - 3e-4: +0.9997 * 0.5
    loss = case.loss(gspo, EXACT)
    assert float(loss.sum) == pytest.approx(-np.sqrt(0.75) * 1.5 + 0.49985, rel=1e-6)
    assert int(loss.count) == 2
    assert float(loss.metrics["policy_clipped_share"].total) == 1.0


def test_gradient_is_that_of_the_sequence_form(case):
    batch = gspo.prepare(case.rollouts, case.rewards, EXACT).replace(old_logprobs=case.old_logprobs)
    ones = jnp.ones_like(case.weights)
    grad = jax.grad(lambda lp: gspo.loss(lp, batch, ones, EXACT).sum)(case.trainer_logprobs)

    def sequence_form(lp):
        ratio = jnp.exp(jnp.sum((lp - case.old_logprobs)[0, 1:]) / 2)
        return -ratio

    np.testing.assert_allclose(grad, jax.grad(sequence_form)(case.trainer_logprobs), rtol=1e-6)
    np.testing.assert_allclose(grad[0, 1:], [-np.sqrt(0.75) / 2] * 2, rtol=1e-6)
