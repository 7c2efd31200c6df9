"""Score Centering: by hand, and the property that it is for, a gradient without drift in expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.models import logprobs as scoring
from fp4rl_jax.objectives.centering import centering_term


def test_the_term_and_its_slope_by_hand():
    p, q = np.array([0.5, 0.2]), np.array([0.6, 0.3])  # rest 0.3 and 0.1: rho = 1/3
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32))[None, None] for x in (p, q))
    mask, advantages = jnp.array([[True]]), jnp.array([2.0])
    value, slope = jax.value_and_grad(lambda x: centering_term(x, log_q, advantages, mask)[0, 0])(log_p)
    pull = q - p / 3
    assert float(value) == pytest.approx(2 * np.sum(pull * np.log(p)), rel=1e-5)
    np.testing.assert_allclose(slope[0, 0], 2 * pull, rtol=1e-5)


def test_padding_and_exhausted_candidates_are_safe():
    nan = jnp.full((1, 2, 2), jnp.nan)
    mask = jnp.array([[True, False]])
    half = jnp.log(jnp.full((1, 2, 2), 0.5))  # the candidates are everything: no rest on either side
    dirty = jnp.where(mask[..., None], half, nan)
    value, slope = jax.value_and_grad(lambda x: jnp.sum(centering_term(x, dirty, jnp.ones(1), mask)))(dirty)
    assert float(value) == 0.0
    np.testing.assert_array_equal(slope, np.zeros((1, 2, 2)))


@pytest.mark.parametrize("k", [2, 4, 6])
def test_the_expected_gradient_has_no_drift(k):
    """Over tokens drawn from q: sum of q(a) grad [-A log p(a) + A C] = 0 where q / p is constant off k."""
    rng = np.random.default_rng(k)
    logits = jnp.asarray(rng.normal(size=6), jnp.float32)
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    near = rng.dirichlet(np.ones(k)) * (0.7 if k < 6 else 1.0)
    q = np.concatenate([near, (1 - near.sum()) * p[k:] / max(p[k:].sum(), 1e-9)])

    def expected(logits, centered):
        log_p = jax.nn.log_softmax(logits)
        loss = -jnp.sum(jnp.asarray(q, jnp.float32) * log_p)
        if centered:
            asked = jnp.log(jnp.asarray(q[:k], jnp.float32))[None, None]
            loss += centering_term(log_p[None, None, :k], asked, jnp.ones(1), jnp.array([[True]]))[0, 0]
        return loss

    slope = jax.jit(jax.grad(expected), static_argnums=1)
    assert np.abs(slope(logits, False)).max() > 0.02
    np.testing.assert_allclose(slope(logits, True), np.zeros(6), atol=4e-7)


def test_candidates_are_scored_as_the_softmax_scores_them(rng):
    """Values and gradients, to hidden states and head, against log_softmax over all logits."""
    hidden = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(11, 8)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 11, (5, 4)))
    pull = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)

    def ours(hidden, head):
        tree = {"embed": head}
        own, _ = scoring.token_logprobs(tree, hidden, tokens[:, 0], temperature=0.7, chunk=2)
        found = scoring.candidate_logprobs(
            tree, hidden, tokens[:, 0], own, tokens[:, 1:], temperature=0.7, chunk=2
        )
        return jnp.sum(found * pull), found

    def plain(hidden, head):
        found = jnp.take_along_axis(jax.nn.log_softmax(hidden @ head.T / 0.7), tokens[:, 1:], axis=1)
        return jnp.sum(found * pull), found

    (_, found), slopes = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))(hidden, head)
    (_, wanted), others = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(hidden, head)
    np.testing.assert_allclose(found, wanted, atol=5e-6)
    for a, b in zip(slopes, others, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
