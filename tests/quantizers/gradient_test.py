"""The two straight-through rules, against finite differences and an independent straight-line form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4rl_jax
from fp4rl_jax import Guided, Stochastic

FORMATS = ["nvfp4", "mxfp4", "hif4", "fp8_e4m3"]
X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 128)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).standard_normal((8, 128)), jnp.float32)


def smooth(y: jax.Array) -> jax.Array:
    """What follows the quantizer: smooth, so that finite differences of it mean something."""
    return jnp.sum(jnp.sin(y) * W)


@pytest.mark.parametrize("fmt", FORMATS)
def test_identity_passes_the_gradient_of_the_smooth_part(fmt):
    y = np.asarray(fp4rl_jax.fake_quantize(X, fmt), np.float64)
    gradient = np.asarray(jax.grad(lambda x: smooth(fp4rl_jax.fake_quantize(x, fmt)))(X))
    h = 1e-5
    differences = (np.sin(y + h) - np.sin(y - h)) / (2 * h) * np.asarray(W, np.float64)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_the_rules_equal_a_straight_line_form(fmt, ste):
    q = fp4rl_jax.quantize(X, fmt)
    value = q.dequantize()
    scale = np.asarray(q.inner()) / np.where(element := np.asarray(q.fmt.element(q.codes())), element, 1)
    if q.outer_scale is not None:
        scale = scale * np.asarray(q.outer_scale)
    # a zero code hides its block's scale; such an element is far from the limit anyway
    limit = np.where(element == 0, np.inf, np.abs(scale) * q.fmt.qmax)
    inside = np.ones(X.shape) if ste == "identity" else (np.abs(np.asarray(X)) <= limit)

    def straight(x):
        passed = jnp.where(inside, x, jax.lax.stop_gradient(x))
        return smooth(passed + jax.lax.stop_gradient(value - x))

    ours = jax.grad(lambda x: smooth(fp4rl_jax.fake_quantize(x, fmt, ste=ste)))(X)
    np.testing.assert_allclose(np.asarray(ours), np.asarray(jax.grad(straight)(X)), rtol=1e-5, atol=1e-6)
    if ste == "clipped" and fmt != "fp8_e4m3":
        assert 0 < (np.asarray(ours) == 0).sum() < X.size / 8


def test_clipped_zeroes_exactly_the_values_beyond_the_last_code():
    x = jnp.zeros(32).at[:3].set(jnp.array([7.5, 6.0, -6.5]))  # floor rule: scale 1, limit 6
    gradient = jax.grad(lambda x: fp4rl_jax.fake_quantize(x, "mxfp4", ste="clipped").sum())(x)
    np.testing.assert_array_equal(np.asarray(gradient)[:4], [0, 1, 0, 1])


def test_bfloat16_and_any_axis_keep_shape_and_dtype():
    x = X.reshape(8, 16, 8).astype(jnp.bfloat16)
    gradient = jax.grad(lambda x: fp4rl_jax.fake_quantize(x, "nvfp4", axis=1).astype(jnp.float32).sum())(x)
    assert (gradient.shape, gradient.dtype) == (x.shape, jnp.bfloat16)
    assert (gradient == 1).all()


def test_key_hint_and_outer_scale_get_zero_gradients():
    hint = fp4rl_jax.quantize(X + 0.05 * W, "nvfp4")

    def loss(x, outer_scale, hint):
        static = fp4rl_jax.fake_quantize(x, "nvfp4", outer="static", outer_scale=outer_scale)
        guided = fp4rl_jax.fake_quantize(x, "nvfp4", rounding=Guided(), hint=hint)
        noisy = fp4rl_jax.fake_quantize(x, "nvfp4", rounding=Stochastic(), key=jax.random.key(0))
        return (static + guided + noisy).sum()

    dx, douter, dhint = jax.grad(loss, (0, 1, 2), allow_int=True)(X, jnp.float32(2.0**-8), hint)
    assert (dx == 3).all() and douter == 0 and dhint.outer_scale == 0


def test_an_unknown_rule_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'clipped'"):
        fp4rl_jax.fake_quantize(X, "nvfp4", ste="cliped")
