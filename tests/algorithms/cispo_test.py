"""CISPO by hand; see conftest for the case."""

import jax
import numpy as np
import pytest

from fp4rl_jax.algorithms import cispo

EXACT = cispo.Config(std_eps=1e-9)


def test_loss_by_hand(case):
    # -1.5 ln 0.3 - 2 * 0.5 ln 0.2 + 0.5 * 0.5 ln 0.4
    loss = case.loss(cispo, EXACT)
    by_hand = -1.5 * np.log(0.3) - np.log(0.2) + 0.25 * np.log(0.4)
    assert float(loss.sum) == pytest.approx(by_hand, rel=1e-6) and int(loss.count) == 3


def test_clipped_tokens_keep_their_gradient(case):
    config = cispo.Config(clip_high=0.2, std_eps=1e-9)
    batch = cispo.prepare(case.rollouts, case.rewards, config).replace(old_logprobs=case.old_logprobs)
    grad = jax.grad(lambda lp: cispo.loss(lp, batch, case.weights, config).sum)(case.trainer_logprobs)
    # -clip(ratio) * A * w: the first token's ratio of 1.5 counts as 1.2
    np.testing.assert_allclose(grad, [[0, -1.2, -1.0], [0, 0.25, 0]], rtol=1e-6)
    share = cispo.loss(case.trainer_logprobs, batch, case.weights, config).metrics["policy_clipped_share"]
    assert float(share.total) == 1.0
