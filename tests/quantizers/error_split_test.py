"""The split of MXFP4's error, worked by hand and on data."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats
from fp4rl_jax.quantizers import Quantizer
from fp4rl_jax.quantizers.error_split import ErrorSplit, error_split


def split(x, scale_rule: str = "floor", **options) -> ErrorSplit:
    q = Quantizer(formats.make("mxfp4", scale_rule=scale_rule)).quantize(jnp.asarray(x))
    return error_split(jnp.asarray(x), q, **options)


def test_by_hand() -> None:
    """amax 7, floor: scale 1. 7 -> 6, 0.25 -> 0 (dead, 1/16), 3.5 -> 4 (even).

    Under 7/6, 7 is 6 and 3.5 is 3. Both are right under s*: bias 1 + 1/4, nothing is left to the grid.
    """
    x = jnp.asarray([[7.0, 0.25, -3.5] + [0.0] * 29], jnp.float32)
    found = split(x)
    np.testing.assert_allclose(found.scale_bias, 1.25, rtol=1e-6)
    np.testing.assert_allclose(found.dead_zone, 1 / 16, rtol=1e-6)
    np.testing.assert_allclose(found.grid, 0.0, atol=1e-6)
    np.testing.assert_allclose(found.signal, 49 + 1 / 16 + 12.25, rtol=1e-6)


def test_a_block_with_an_ideal_scale_has_no_bias() -> None:
    """amax 6: s = s* = 1, so everything that is not dead is grid: 2.4 -> 2, 5.5 -> 6."""
    x = jnp.asarray([[6.0, 2.4, 5.5, -0.2] + [0.0] * 28], jnp.float32)
    found = split(x)
    assert float(found.scale_bias) == 0.0
    np.testing.assert_allclose(found.dead_zone, 0.04, rtol=1e-5)
    np.testing.assert_allclose(found.grid, 0.16 + 0.25, rtol=1e-5)


def test_parts_add_up_to_the_error(rng: np.random.Generator) -> None:
    x = rng.normal(size=(64, 256)).astype(np.float32)
    for rule in ("floor", "rceil"):
        found = split(x, rule)
        back = Quantizer(formats.make("mxfp4", scale_rule=rule)).quantize(jnp.asarray(x)).dequantize()
        error = ((np.asarray(back, np.float64) - x) ** 2).sum()
        parts = np.array([float(found.scale_bias), float(found.dead_zone), float(found.grid)])
        np.testing.assert_allclose(parts.sum(), error, rtol=1e-5)
        assert parts[1] > 0 and parts[2] > 0 and (rule != "floor" or parts[0] > 0)
        np.testing.assert_allclose(float(found.signal), (x.astype(np.float64) ** 2).sum(), rtol=1e-5)


def test_rows_that_do_not_count_and_other_formats(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(4, 64)), jnp.float32)
    masked, alone = split(x, mask=jnp.asarray([True, False, True, False])), split(x[::2])
    for name in ("scale_bias", "dead_zone", "grid", "signal"):
        np.testing.assert_allclose(getattr(masked, name), getattr(alone, name), rtol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match="NVFP4.* has no part of a scale"):
        error_split(x, Quantizer("nvfp4").quantize(x))
