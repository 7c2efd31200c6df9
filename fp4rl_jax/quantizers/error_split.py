"""Where the error of MXFP4 comes from: its power-of-two scale, its dead zone, its grid.

After arXiv 2605.20402, written out. Elements are parted by their code: with the scale s that the format
chose and the ideal scale s* = amax / 6 of each block,

    dead_zone   sum of x^2 over nonzero elements whose code is zero
    grid        sum of (Q_s*(x) - x)^2 over the others: what E2M1 loses under the ideal scale
    scale_bias  sum of (Q_s(x) - x)^2 - (Q_s*(x) - x)^2 over the others: what the power of two adds

The three add up to the squared error. `scale_bias` is below zero where the power of two did better.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax import formats
from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.quantizer import Quantizer
from fp4rl_jax.quantizers.residual._base import runs, unrun


@struct.dataclass
class ErrorSplit:
    """Sums over all elements, float32: the three parts, and the signal's energy sum x^2."""

    scale_bias: Array
    dead_zone: Array
    grid: Array
    signal: Array

    @property
    def total(self) -> Array:
        """Sum of squared errors."""
        return self.scale_bias + self.dead_zone + self.grid


def mxfp4_error_split(x: Array, *, scale_rule: str = "floor") -> ErrorSplit:
    """Splits MXFP4's error on an array, blocks along its last axis.

    Args:
        x: [..., K] float32 or bfloat16, finite.
        scale_rule: as in the format.

    Returns:
        ErrorSplit of [] leaves. Exact: the parts add up to the squared error by construction.
    """
    quantizer = Quantizer(formats.make("mxfp4", scale_rule=scale_rule))
    wide = x.astype(jnp.float32)
    value = quantizer.quantize(wide).dequantize()
    ideal = _ideally_scaled(wide)
    dead = (wide != 0) & (value == 0)
    grid = jnp.sum(jnp.where(dead, 0.0, ideal - wide) ** 2)
    return ErrorSplit(
        scale_bias=jnp.sum(jnp.where(dead, 0.0, value - wide) ** 2) - grid,
        dead_zone=jnp.sum(jnp.where(dead, wide, 0.0) ** 2),
        grid=grid,
        signal=jnp.sum(wide**2),
    )


@jax.jit
def _ideally_scaled(x: Array) -> Array:
    """Every block of 32 rounded to E2M1 under amax / 6: the block brought to a maximum of 6 and back.

    A block whose maximum is 6 has MXFP4's scale 1, so the format's own encoder rounds it.
    """
    blocks = runs(x, 32)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scale = jnp.where(amax > 0, amax / 6, 1.0)
    near = jnp.clip(blocks / scale, -6.0, 6.0)
    near = jnp.where(jnp.abs(blocks) == amax, jnp.sign(blocks) * jnp.where(amax > 0, 6.0, 0.0), near)
    rounded = Quantizer(formats.make("mxfp4", scale_rule="floor")).quantize(near).dequantize()
    return unrun(rounded * scale, x.shape[-1])
