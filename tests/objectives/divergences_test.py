"""k1, k2, k3 and their relatives, by hand and against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.objectives import divergences

LN2 = np.log(2.0)


def test_by_hand_at_a_factor_of_two():
    up, down = jnp.float32(LN2), jnp.float32(-LN2)
    assert float(divergences.k1(up)) == pytest.approx(-0.6931472)
    assert float(divergences.k2(up)) == pytest.approx(0.2402265)
    assert float(divergences.k3(up)) == pytest.approx(2 - LN2 - 1)
    assert float(divergences.k3(down)) == pytest.approx(0.5 + LN2 - 1)
    assert float(divergences.k3_reverse(up)) == pytest.approx(0.5 + LN2 - 1)


def test_k3_keeps_its_digits_near_zero():
    gaps = np.concatenate([[0.0], np.logspace(-12, 1, 400), -np.logspace(-12, 1, 400)]).astype(np.float32)
    exact = np.expm1(gaps.astype(np.longdouble)) - gaps
    small = np.abs(gaps) < 1e-4  # there the long double difference cancels too
    exact[small] = gaps[small].astype(np.longdouble) ** 2 / 2 * (1 + gaps[small].astype(np.longdouble) / 3)
    found = np.asarray(divergences.k3(jnp.asarray(gaps)))
    assert np.all(found >= 0)
    normal = np.abs(exact) > 1e-30
    assert np.max(np.abs(found - exact)[normal] / exact[normal]) < 1e-5


def test_k3_gradient_is_expm1_everywhere():
    gaps = jnp.array([-60.0, -1.0, -0.05, -0.01, 0.0, 1e-6, 0.049, 0.05, 1.0, 20.0])
    grad = jax.vmap(jax.grad(divergences.k3))(gaps)
    np.testing.assert_allclose(grad, np.expm1(np.asarray(gaps, np.float64)), rtol=1e-5, atol=1e-12)


def test_clamped_stops_at_twenty_nats_with_its_gradient():
    gaps = jnp.array([-1e4, -19.0, 19.0, 1e4])
    np.testing.assert_array_equal(divergences.clamped(gaps), [-20.0, -19.0, 19.0, 20.0])
    np.testing.assert_array_equal(jax.vmap(jax.grad(divergences.clamped))(gaps), [0.0, 1.0, 1.0, 0.0])


def test_jensen_shannon_by_hand():
    # p = 0.4, q = 0.2, mixture 0.3: p/m = 4/3, q/m = 2/3
    by_hand = 0.5 * (4 / 3 - np.log(4 / 3) - 1) + 0.5 * (2 / 3 - np.log(2 / 3) - 1)
    p, q = jnp.log(jnp.float32(0.4)), jnp.log(jnp.float32(0.2))
    assert float(divergences.jensen_shannon(p, q)) == pytest.approx(by_hand, rel=1e-5)
    assert float(divergences.jensen_shannon(q, p)) == pytest.approx(by_hand, rel=1e-5)
    assert float(divergences.jensen_shannon(p, p)) == 0.0


def test_k3_is_unbiased_for_a_small_distribution():
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    estimate = np.sum(q * np.asarray(divergences.k3(jnp.log(p / q))))
    assert estimate == pytest.approx(np.sum(q * np.log(q / p)), rel=1e-5)
