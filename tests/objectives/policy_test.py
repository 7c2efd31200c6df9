"""Per-token policy losses by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.objectives import policy

RATIO = jnp.array([[0.5, 0.9, 1.0, 1.1, 1.5]])


def test_clipped_surrogate_by_hand():
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    good, held = policy.clipped_surrogate(RATIO, jnp.array([2.0]), **clips)
    np.testing.assert_allclose(good, [[-1.0, -1.8, -2.0, -2.2, -2.56]], rtol=1e-6)
    np.testing.assert_array_equal(held, [[False, False, False, False, True]])
    bad, held = policy.clipped_surrogate(RATIO, jnp.array([-2.0]), **clips)
    np.testing.assert_allclose(bad, [[1.6, 1.8, 2.0, 2.2, 3.0]], rtol=1e-6)
    np.testing.assert_array_equal(held, [[True, False, False, False, False]])


def test_clip_is_the_papers_minimum():
    rng = np.random.default_rng(0)
    ratio = jnp.asarray(rng.lognormal(0, 0.5, (8, 50)), jnp.float32)
    advantage = jnp.asarray(rng.normal(size=8), jnp.float32)
    found, held = policy.clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.28)
    a = advantage[:, None]
    np.testing.assert_allclose(found, -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.28) * a), rtol=1e-6)
    assert 0.1 < float(jnp.mean(held)) < 0.5


def test_gradient_is_minus_advantage_inside_and_zero_where_held():
    def total(ratio):
        return jnp.sum(policy.clipped_surrogate(ratio, jnp.array([2.0]), clip_low=0.2, clip_high=0.28)[0])

    np.testing.assert_array_equal(jax.grad(total)(RATIO), [[-2.0, -2.0, -2.0, -2.0, 0.0]])


def test_log_ratio_of_a_first_update_is_exactly_zero_with_gradient_one():
    logprobs, mask = jnp.array([[-1.3, -0.7]]), jnp.array([[True, False]])
    found = policy.log_ratio(logprobs, None, mask)
    np.testing.assert_array_equal(found, [[0.0, 0.0]])
    grad = jax.grad(lambda x: jnp.sum(policy.log_ratio(x, None, mask)))(logprobs)
    np.testing.assert_array_equal(grad, [[1.0, 0.0]])


def test_sequence_ratio_by_hand():
    # ratios 3/2 and 1/2: the length-normalised sequence ratio is sqrt(3/4)
    mask = jnp.array([[True, True, False]])
    token = jnp.log(jnp.array([[1.5, 0.5, 7.0]]))
    found = jnp.exp(policy.sequence_log_ratio(token, mask))
    np.testing.assert_allclose(found, [[np.sqrt(0.75), np.sqrt(0.75), 1.0]], rtol=1e-6)


def test_sequence_ratio_has_the_gradient_of_the_sequence_form():
    mask = jnp.array([[True, True, False]])
    token = jnp.log(jnp.array([[1.5, 0.5, 7.0]]))

    def token_form(x):
        return jnp.sum(jnp.where(mask, jnp.exp(policy.sequence_log_ratio(x, mask)), 0)) / 2

    def sequence_form(x):
        return jnp.exp(jnp.sum(jnp.where(mask, x, 0)) / 2)

    np.testing.assert_allclose(jax.grad(token_form)(token), jax.grad(sequence_form)(token), rtol=1e-6)


def test_weighted_log_likelihood_by_hand():
    logprobs = jnp.log(jnp.array([[0.3, 0.2]]))
    found, held = policy.weighted_log_likelihood(
        logprobs, jnp.array([[1.5, 0.5]]), jnp.array([2.0]), clip_low=1.0, clip_high=0.2
    )
    np.testing.assert_allclose(found, [[-1.2 * 2 * np.log(0.3), -0.5 * 2 * np.log(0.2)]], rtol=1e-6)
    np.testing.assert_array_equal(held, [[True, False]])
