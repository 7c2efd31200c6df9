"""Straight-through estimator of one array: quantize and dequantize forward, a written rule backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.formats import Format
from fp4rl_jax.quantizers._encode import AxisName, Scaled, choose_scales
from fp4rl_jax.quantizers.rounding import Hint, Rounding


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def fake_quantize(
    x: Array,
    key: Array | None,
    hint: Hint | None,
    outer_scale: Array | None,
    fmt: Format,
    rounding: Rounding,
    ste: str,
    axis: int,
    axis_name: AxisName,
) -> Array:
    """`dequantize(quantize(x))` in x's dtype; the arguments are `Quantizer`'s."""
    return _round_trip(x, key, hint, outer_scale, fmt, rounding, "identity", axis, axis_name)[0]


@partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _round_trip(
    x: Array,
    key: Array | None,
    hint: Hint | None,
    outer_scale: Array | None,
    fmt: Format,
    rounding: Rounding,
    ste: str,
    axis: int,
    axis_name: AxisName,
) -> tuple[Array, Array | None]:
    """The values, and where the gradient passes: None for everywhere."""
    scaled = choose_scales(
        x, fmt, rounding, axis=axis, key=key, hint=hint, outer_scale=outer_scale, axis_name=axis_name
    )
    value = fmt.decode(scaled.codes(fmt), scaled.scales, scaled.outer_scale, x.dtype)
    passes = None if ste == "identity" else _inside(x, scaled, fmt, axis)
    return jnp.moveaxis(value[..., : x.shape[axis]], -1, axis), passes


def _forward(x, key, hint, outer_scale, fmt, rounding, ste, axis, axis_name):
    value, passes = _round_trip(x, key, hint, outer_scale, fmt, rounding, ste, axis, axis_name)
    return value, (passes, key, hint, outer_scale)


def _backward(fmt, rounding, ste, axis, axis_name, saved, dy):
    passes, key, hint, outer_scale = saved
    dx = dy if passes is None else jnp.where(passes, dy, jnp.zeros_like(dy))
    return dx, _zero(key), _zero(hint), _zero(outer_scale)


fake_quantize.defvjp(_forward, _backward)


def _inside(x: Array, scaled: Scaled, fmt: Format, axis: int) -> Array:
    """bool in x's shape, True where |x| / scale <= qmax."""
    inside = fmt.within(scaled.x, scaled.scales, scaled.outer_scale)[..., : x.shape[axis]]
    return jnp.moveaxis(inside, -1, axis)


def _zero(tree: PyTree) -> PyTree:
    """A cotangent of zeros: float0 for integers and keys."""

    def zero(leaf: Array) -> Array | np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros_like(leaf)
        return np.zeros(leaf.shape, jax.dtypes.float0)

    return jax.tree.map(zero, tree)
