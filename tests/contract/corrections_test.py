"""Every file in corrections/ through one suite. No correction is named here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import corrections, plugins

NAMES = plugins.names(corrections)


@pytest.fixture(params=NAMES)
def module(request):
    return plugins.load(corrections, request.param)


def _case(scale=1.0):
    rng = np.random.default_rng(0)
    log_ratio = jnp.asarray(rng.normal(0, scale, (6, 9)), jnp.float32)
    mask = rng.random((6, 9)) < 0.7
    mask[3] = False
    return log_ratio, jnp.asarray(mask)


def test_some_corrections_exist():
    assert len(NAMES) >= 4


def test_config_is_frozen_and_hashable_by_value(module):
    assert module.Config() == module.Config() and hash(module.Config()) == hash(module.Config())


def test_equal_sides_weigh_one(module):
    log_ratio, mask = _case()
    weights = module.weights(jnp.zeros_like(log_ratio), mask, module.Config())
    np.testing.assert_array_equal(weights, mask.astype(np.float32))
    assert weights.dtype == jnp.float32
    assert not np.any(module.clipped(jnp.zeros_like(log_ratio), mask, module.Config()))


def test_weights_are_detached_finite_and_zero_off_the_mask(module):
    log_ratio, mask = _case(scale=100.0)
    dirty = jnp.where(mask, log_ratio, jnp.nan)
    weights, grad = jax.value_and_grad(lambda x: jnp.sum(module.weights(x, mask, module.Config())))(dirty)
    assert np.isfinite(weights)
    np.testing.assert_array_equal(grad, np.zeros(grad.shape))
    np.testing.assert_array_equal(np.where(mask, 0, module.weights(dirty, mask, module.Config())), 0)


def test_clipped_marks_what_did_not_get_through(module):
    log_ratio, mask = _case()
    weights = module.weights(log_ratio, mask, module.Config())
    clipped = module.clipped(log_ratio, mask, module.Config())
    assert clipped.dtype == bool and not np.any(clipped & ~mask)
    same = np.isclose(weights, jnp.exp(log_ratio), rtol=1e-6) | np.isclose(weights, 1.0)
    np.testing.assert_array_equal(np.asarray(mask & ~clipped), np.asarray(mask) & same)


def test_rows_are_independent(module):
    log_ratio, mask = _case(scale=0.01)
    whole = module.weights(log_ratio, mask, module.Config())
    rows = [module.weights(log_ratio[i : i + 1], mask[i : i + 1], module.Config()) for i in range(6)]
    np.testing.assert_array_equal(whole, jnp.concatenate(rows))


def test_jit_traces_once_and_equals_eager(module):
    log_ratio, mask = _case(scale=0.3)
    traces = []

    def counted(x, m, config):
        traces.append(1)
        return module.weights(x, m, config)

    jitted = jax.jit(counted, static_argnums=2)
    first = jitted(log_ratio, mask, module.Config())
    jitted(log_ratio + 1, mask, module.Config())
    assert len(traces) == 1
    np.testing.assert_allclose(first, module.weights(log_ratio, mask, module.Config()), rtol=1e-6)


def test_wrong_shapes_are_refused(module):
    log_ratio, mask = _case()
    with pytest.raises(AssertionError):
        module.weights(log_ratio[:, 1:], mask, module.Config())
    with pytest.raises(AssertionError):
        module.weights(log_ratio, mask.astype(jnp.float32), module.Config())
