"""Where the error of a format with power-of-two block scales (MXFP4) comes from: scale, dead zone, grid.

After arXiv 2605.20402, written out. Elements are parted by their code: with the scale s that the format
chose and the ideal scale s* = amax / qmax of each block (qmax = 6 in MXFP4),

    dead_zone   sum of x^2 over nonzero elements whose code is zero
    grid        sum of (Q_s*(x) - x)^2 over the others: what the grid loses under the ideal scale
    scale_bias  sum of (Q_s(x) - x)^2 - (Q_s*(x) - x)^2 over the others: what the power of two adds

The three add up to the squared error. `scale_bias` is below zero where the power of two did better.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import Format
from fp4rl_jax.formats._grid import GridBracket
from fp4rl_jax.qtensor import QTensor
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


def error_split(x: Array, q: QTensor, *, mask: Array | None = None) -> ErrorSplit:
    """Splits the error that was made when `x` became `q`.

    Args:
        x: [..., K] float32 or bfloat16, finite; its last axis is `q`'s quantized axis.
        q: its QTensor, of a format whose block scales are powers of two.
        mask: [...] bool over the rows, True where a row counts; all by default.

    Returns:
        ErrorSplit of [] leaves. Exact: the parts add up to the squared error by construction.

    Raises:
        ValueError: the format's block scales are no powers of two, or `q` is not of x's shape and axis.
    """
    if not q.fmt.power_of_two_scale:
        raise ValueError(f"the error of format {q.fmt} has no part of a scale that is a power of two")
    if q.shape != x.shape or q.axis != -1:
        raise ValueError(f"q of shape {q.shape} and axis {q.axis} does not describe x {x.shape}")
    wide = x.astype(jnp.float32)
    if mask is not None:
        wide = jnp.where(jnp.broadcast_to(mask, x.shape[:-1])[..., None], wide, 0.0)
    value = jnp.where(wide == 0, 0.0, q.dequantize())  # a zero has the code of zero
    dead = (wide != 0) & (value == 0)
    grid = jnp.sum(jnp.where(dead, 0.0, _ideally_scaled(wide, fmt=q.fmt) - wide) ** 2)
    return ErrorSplit(
        scale_bias=jnp.sum(jnp.where(dead, 0.0, value - wide) ** 2) - grid,
        dead_zone=jnp.sum(jnp.where(dead, wide, 0.0) ** 2),
        grid=grid,
        signal=jnp.sum(wide**2),
    )


@partial(jax.jit, static_argnames="fmt")
def _ideally_scaled(x: Array, *, fmt: Format) -> Array:
    """Every block rounded to the format's grid under amax / qmax, its maximum to itself."""
    assert fmt.block is not None
    blocks = runs(x, fmt.block)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scale = jnp.where(amax > 0, amax / fmt.qmax, 1.0)
    code = GridBracket(fmt.grid, jnp.abs(blocks) / scale, jnp.float32(1)).nearest()
    near = jnp.where(jnp.abs(blocks) == amax, amax, fmt.grid.decode(code) * scale)
    return unrun(jnp.sign(blocks) * near, x.shape[-1])
