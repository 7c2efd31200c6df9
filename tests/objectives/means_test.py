"""Sums carry exact denominators and do not depend on how a batch is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.objectives import means


def _ulp(x):
    return np.spacing(np.abs(np.float32(x)))


def test_masked_sum_by_hand():
    values = jnp.array([[1.0, 2.0, jnp.nan], [4.0, 8.0, 16.0]])
    mask = jnp.array([[True, True, False], [False, True, False]])
    sums = means.masked_sum(values, mask)
    assert (float(sums.total), int(sums.count)) == (11.0, 3)
    assert float(sums.mean()) == np.float32(11.0) / np.float32(3.0)
    assert sums.count.dtype == jnp.int32


def test_masked_sequence_sum_by_hand():
    values = jnp.array([[1.0, 2.0, 9.0], [4.0, 8.0, 18.0], [7.0, 7.0, 7.0]])
    mask = jnp.array([[True, True, False], [True, True, True], [False, False, False]])
    sums = means.masked_sequence_sum(values, mask)
    assert (float(sums.total), int(sums.count)) == (1.5 + 10.0, 2)
    constant = means.masked_sequence_sum(values, mask, length=4)
    assert (float(constant.total), int(constant.count)) == (3.0 / 4 + 30.0 / 4, 2)


def test_all_masked_is_zero_and_has_zero_gradient():
    mask = jnp.zeros((2, 3), bool)
    for function in (means.masked_sum, means.masked_sequence_sum):
        value, grad = jax.value_and_grad(lambda x, f=function: f(x, mask).mean())(jnp.full((2, 3), jnp.nan))
        assert float(value) == 0.0
        np.testing.assert_array_equal(grad, np.zeros((2, 3)))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 17)])
def test_total_is_exact_to_two_words_then_rounded_once(shape):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    values = np.concatenate([values, -values, np.float32(1e-3) * values[:1]])  # heavy cancellation
    sums = jax.jit(means.masked_sum)(jnp.asarray(values), jnp.ones(values.shape, bool))
    exact = np.sum(values.astype(np.longdouble))
    two_words = np.longdouble(sums.total) + np.longdouble(sums.carry)
    # A two-word addition is off by at most 2^-46 of its operands; the tree has log2(n) levels.
    bound = np.log2(2 * values.size) * 2.0**-46 * np.sum(np.abs(values))
    assert abs(two_words - exact) <= bound
    assert abs(np.longdouble(sums.total) - two_words) <= 0.5 * _ulp(two_words)


def test_any_split_gives_the_same_bits():
    rng = np.random.default_rng(1)
    values = jnp.asarray(rng.standard_normal((48, 21)).astype(np.float32))
    values = values - jnp.mean(values)  # the sum cancels to rounding noise
    mask = jnp.asarray(rng.random((48, 21)) < 0.7)
    for function in (jax.jit(means.masked_sum), jax.jit(means.masked_sequence_sum)):
        whole = function(values, mask)
        for rows in (4, 16):
            parts = [{"x": function(values[i : i + rows], mask[i : i + rows])} for i in range(0, 48, rows)]
            stacked = jax.tree.map(lambda *words: jnp.stack(words), *parts)
            for merged in (means.merge(*parts)["x"], means.summed(stacked)["x"]):
                assert int(merged.count) == int(whole.count)
                assert float(merged.total) == float(whole.total)


@pytest.mark.parametrize("devices", [2, 8])
def test_sharding_over_devices_gives_the_same_bits(devices):
    rng = np.random.default_rng(3)
    values = rng.standard_normal((16, 12)).astype(np.float32)
    values = values - np.mean(values, dtype=np.float32)
    mask = rng.random((16, 12)) < 0.7
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for function in (jax.jit(means.masked_sum), jax.jit(means.masked_sequence_sum)):
        whole = function(values, mask)
        sharded = function(jax.device_put(values, rows), jax.device_put(mask, rows))
        assert float(sharded.total) == float(whole.total)
        assert int(sharded.count) == int(whole.count)


def test_gradient_is_that_of_a_plain_sum():
    rng = np.random.default_rng(2)
    values = jnp.asarray(rng.standard_normal((4, 6)).astype(np.float32))
    mask = jnp.asarray(rng.random((4, 6)) < 0.5)
    grad = jax.grad(lambda x: means.masked_sum(jnp.square(x), mask).total)(values)
    np.testing.assert_array_equal(grad, np.where(mask, 2 * values, 0))


def test_merge_names_the_keys_that_differ():
    sums = means.masked_sum(jnp.ones(2), jnp.ones(2, bool))
    with pytest.raises(ValueError, match=r"\['b'\]"):
        means.merge({"a": sums}, {"a": sums, "b": sums})


def test_sequence_length_must_be_positive():
    with pytest.raises(ValueError, match="length is 0"):
        means.masked_sequence_sum(jnp.ones((1, 2)), jnp.ones((1, 2), bool), length=0)
