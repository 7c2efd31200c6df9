"""Integer arithmetic against numpy's IEEE float32, subnormals included."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.formats import _bits


def patterns(rng: np.random.Generator, count: int) -> np.ndarray:
    """Positive finite float32 of every binade, subnormals and the two ends included."""
    bits = rng.integers(1, 0x7F800000, count, dtype=np.int64).astype(np.uint32)
    bits[:64] = np.arange(1, 65)
    bits[64:96] = 0x00800000 + np.arange(-16, 16)
    bits[96:128] = 0x7F7FFFFF - np.arange(32)
    return bits.view(np.float32)


def test_log_form_is_monotone_and_invertible(rng):
    x = np.sort(patterns(rng, 20000))
    log = np.asarray(_bits.from_float(jnp.asarray(x)))
    assert (np.diff(log.astype(np.int64)) >= 0).all()
    back = np.asarray(_bits.to_float(jnp.asarray(log)))
    np.testing.assert_array_equal(back.view(np.int32), x.view(np.int32))
    np.testing.assert_array_equal(np.asarray(_bits.exponent(jnp.asarray(log))), np.frexp(x)[1] - 1)


def test_quotients_are_correctly_rounded(rng):
    a, b = patterns(rng, 20000), rng.permutation(patterns(rng, 20000))
    exact = np.log2(a.astype(np.float64) / b.astype(np.float64))
    keep = (exact > -125.5) & (exact < 127.5)
    quotient = _bits.to_float(
        _bits.divide(_bits.from_float(jnp.asarray(a)), _bits.from_float(jnp.asarray(b)))
    )
    with np.errstate(all="ignore"):
        expected = a / b
    np.testing.assert_array_equal(np.asarray(quotient)[keep], expected[keep])
    too_large = exact > 128.5
    assert np.isinf(np.asarray(quotient)[too_large]).all() and too_large.sum() > 1000


def test_products_are_correctly_rounded(rng):
    a, b = patterns(rng, 20000), rng.permutation(patterns(rng, 20000))
    exact = np.log2(a.astype(np.float64)) + np.log2(b.astype(np.float64))
    keep = (exact > -125.5) & (exact < 127.5)
    product = _bits.to_float(
        _bits.multiply(_bits.from_float(jnp.asarray(a)), _bits.from_float(jnp.asarray(b)))
    )
    with np.errstate(all="ignore"):
        expected = a * b
    np.testing.assert_array_equal(np.asarray(product)[keep], expected[keep])
    assert np.isinf(np.asarray(product)[exact >= 128]).all() and (exact >= 128).sum() > 1000


@pytest.mark.parametrize("k", [-148, -127, -60, 0, 90, 127])
def test_scaling_by_a_power_of_two_is_exact(rng, k):
    x = patterns(rng, 20000)
    exact = np.ldexp(x.astype(np.float64), -k)
    keep = (exact > 2.0**-60) & (exact < 2.0**60)
    scaled = np.asarray(_bits.scaled(_bits.from_float(jnp.asarray(x)), k), np.float64)
    np.testing.assert_array_equal(scaled[keep], exact[keep])
    assert (scaled[exact <= 2.0**-60] <= 2.0**-60).all() and (scaled[exact >= 2.0**60] >= 2.0**60).all()


def test_subnormal_results_are_rounded_to_nearest_even(rng):
    x = patterns(rng, 20000)
    log = _bits.from_float(jnp.asarray(x)) - (40 << _bits.MANTISSA)
    expected = np.ldexp(x.astype(np.float64), -40).astype(np.float32)
    got = np.asarray(_bits.to_float(log))
    np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def test_block_amax_puts_nan_over_inf_over_numbers():
    x = jnp.array([[1.0, -3.0, 2.0], [1.0, jnp.inf, 2.0], [jnp.nan, -jnp.inf, 2.0], [0.0, -0.0, 1e-45]])
    amax = np.asarray(_bits.block_amax(x)).view(np.float32)
    assert amax[0] == 3 and np.isposinf(amax[1]) and np.isnan(amax[2])
    assert np.asarray(_bits.block_amax(x))[3] == 1
