"""The remedies for outliers that the residual methods are compared with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import ops
from fp4rl_jax.ops.operands import smoothing_of
from fp4rl_jax.quantizers.residual import ChannelStats, channel_stats
from fp4rl_jax.recipes import baseline_w4a4

METHODS = ("smoothquant", "hadamard", "clamp", "four_over_six")


def spec_of(method: str, **knobs: object) -> ops.MatmulSpec:
    config = baseline_w4a4.Config(method=method, **knobs)  # pyright: ignore[reportArgumentType]
    return baseline_w4a4.rollout(config).rules[0][1]


def stats_of(x: jax.Array) -> ChannelStats:
    return channel_stats(jnp.zeros_like(x), x, jnp.ones(len(x), bool))


@functools.partial(jax.jit, static_argnames="spec")
def run(x: jax.Array, w: jax.Array, *, spec: ops.MatmulSpec):
    """The product from published weights, and its quantized operands."""
    if spec.needs_calibration:
        q = ops.calibrated_weight(w, spec, stats_of(x))
    else:
        q = ops.quantize_weight(w, spec.weight)
    smooth = q.smoothing if isinstance(q, ops.Calibrated) else jnp.ones(x.shape[-1])
    weight = (q.weight if isinstance(q, ops.Calibrated) else q).dequantize()
    if spec.residual is None:
        act = spec.act.quantize(x * smooth).dequantize()
    else:
        parts = spec.residual.split(x, spec.act, dtype=jnp.float32)
        act = sum(v if outer is None else v * outer for v, outer in parts)
    return ops.matmul(x, ops.prepare(q), spec), act, weight


def outliers(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Two of 64 channels are 40 times the others."""
    x = rng.normal(size=(12, 64)) * np.where(np.arange(64) % 37 == 5, 40.0, 1.0)
    return jnp.asarray(x, jnp.float32), jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m == "smoothquant" else pytest.mark.slow) for m in METHODS]
)
def test_the_product_is_that_of_the_remedied_operands(method: str, rng: np.random.Generator) -> None:
    """Equals the float64 product of what was quantized; high-precision rests are rounded to 2^-8."""
    x, w = outliers(rng)
    spec = spec_of(method)
    y, act, weight = (np.asarray(a, np.float64) for a in run(x, w, spec=spec))
    slack = 2.0**-8 if spec.residual is not None else 0.0  # the rest is an operand of the dot's dtype
    bound = ((64 + 6) * 2.0**-24 + slack) * (np.abs(act) @ np.abs(weight).T)
    assert np.all(np.abs(y - act @ weight.T) <= bound)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["smoothquant", "clamp"])
def test_outliers_cost_less(method: str, rng: np.random.Generator) -> None:
    x, w = outliers(rng)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    plain = baseline_w4a4.trainer(baseline_w4a4.Config()).rules[0][1]
    found = [np.asarray(run(x, w, spec=s)[0], np.float64) for s in (plain, spec_of(method, outliers=0.05))]
    errors = [((y - exact) ** 2).sum() for y in found]
    assert errors[1] < errors[0]


def test_smoothing_by_hand() -> None:
    """amax(x) = 4 and 9, amax(w) = 1 and 16, alpha = 1/2: s = 2 and 3/4; dead channels are left alone."""
    w = jnp.asarray([[1.0, -16.0, 0.0, 2.0], [0.5, 3.0, 0.0, 1.0]])
    factors = smoothing_of(w, jnp.asarray([4.0, 9.0, 1.0, 0.0]), alpha=0.5)
    np.testing.assert_allclose(factors, [1 / 2, 4 / 3, 1.0, 1.0], rtol=1e-6)
    moved = smoothing_of(w, jnp.asarray([4.0, 9.0, 1.0, 0.0]), alpha=1.0)
    np.testing.assert_allclose(moved, [1 / 4, 1 / 9, 1.0, 1.0], rtol=1e-6)


def test_experts_of_a_stack_share_one_smoothing() -> None:
    """[L, E, N, K] weights, [L, K] statistics: the largest weight of all experts of a layer counts."""
    w = jnp.ones((2, 3, 4, 16)).at[1, 2, 0, 5].set(4.0)
    stats = ChannelStats(*(jnp.ones((2, 16)) for _ in range(3)))
    q = ops.calibrated_weight(w, spec_of("smoothquant"), stats)
    assert q.smoothing.shape == (2, 16) and q.weight.shape == w.shape
    np.testing.assert_array_equal(q.smoothing[:, 4:6], [[1.0, 1.0], [1.0, 2.0]])


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rule of nvfp4's scales"):
        spec_of("four_over_six", format="mxfp4")
    with pytest.raises(ValueError, match="share in \\(0, 1\\), got 1.5"):
        spec_of("clamp", outliers=1.5)
    with pytest.raises(ValueError, match="expected 0..1"):
        spec_of("smoothquant", alpha=2.0)
