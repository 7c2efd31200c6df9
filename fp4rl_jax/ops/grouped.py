"""The quantized matmul of a mixture of experts: one weight for each run of sorted rows.

Backward: the modes of `matmul` (see the table there). Where wgrad quantizes along the rows, a
block at the border of two experts holds rows of both.
"""

import functools

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.matmul import (
    Operand,
    Plan,
    decoded_operands,
    dgrad_operands,
    fold_key,
    to_save,
    wgrad_operands,
)
from fp4rl_jax.ops.operands import Prepared, decode, operand_dtype
from fp4rl_jax.ops.rounding import settle
from fp4rl_jax.ops.spec import HIGH_PRECISION, MatmulSpec, Order


def grouped_matmul(
    x: Array,
    w: Operand,
    group_sizes: Array,
    spec: MatmulSpec = HIGH_PRECISION,
    *,
    order: Order = "free",
    key: Array | None = None,
    hint: PyTree = None,
) -> Array:
    """Multiplies every row by the weight of its expert, quantizing both as `spec` says.

    Args:
        x: [M, K] bfloat16 or float32, rows sorted by expert.
        w: [E, N, K]: array, QTensor (each expert with its own outer scale) or Prepared.
        group_sizes: [E] int32; rows beyond their sum give zeros.
        spec, order, key, hint: as in `matmul`.

    Returns:
        [M, N] in x's dtype; accumulation is float32.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"x {x.shape} and w {w.shape} do not form [M, K] @ [E, N, K].T")
    plan = Plan(
        spec=spec,
        order=order,
        out_dtype=jnp.dtype(x.dtype).name,
        machine=machines.current(),
    )
    return _grouped(plan, x, w, group_sizes, key, hint)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(plan: Plan, x: Array, w: Operand, group_sizes: Array, key, hint) -> Array:
    return _forward(plan, x, w, group_sizes, key, hint)[0]


def _forward(plan: Plan, x: Array, w: Operand, group_sizes: Array, key, hint):
    x_d, w_d = decoded_operands(plan, x, w, key=key, hint=hint)
    y = kernels.grouped_matmul(x_d.operand, w_d.operand, group_sizes, order=plan.order)
    y = _times_scales(y, x_d, w_d, group_sizes)
    if plan.order == "fixed":
        y = jax.lax.optimization_barrier(y)
    return settle(y, jnp.dtype(plan.out_dtype)), (x_d, w_d)


def _fwd(plan: Plan, x: Array, w: Operand, group_sizes: Array, key, hint):
    y, decoded = _forward(plan, x, w, group_sizes, key, hint)
    return y, (to_save(plan.spec, x, w, decoded=decoded), group_sizes, key)


def _bwd(plan: Plan, residuals, dy: Array):
    saved, group_sizes, key = residuals
    dx = _dgrad(plan, dy, saved.w, group_sizes, fold_key(key, 2))
    dx = settle(dx, saved.x_like.dtype)
    if saved.w_like is None:
        return dx, None, None, None, None
    dw = _wgrad(plan, dy, saved.x, group_sizes, fold_key(key, 3))
    return dx, settle(dw, saved.w_like.dtype), None, None, None


_grouped.defvjp(_fwd, _bwd)


def _dgrad(plan: Plan, dy: Array, w: Array | Prepared, group_sizes: Array, key: Array | None) -> Array:
    dy_q, w_q, transposed = dgrad_operands(plan.spec, dy, w, key=key)
    dtype = operand_dtype(plan.machine, dy_q, w_q)
    dy_d, w_d = decode(dy_q, dtype), decode(w_q, dtype)
    dx = kernels.grouped_matmul(dy_d.operand, w_d.operand, group_sizes, axis=1 + transposed, order=plan.order)
    return _times_scales(dx, dy_d, w_d, group_sizes)


def _wgrad(plan: Plan, dy: Array, x: Array | Prepared, group_sizes: Array, key: Array | None) -> Array:
    (dy_q, dy_transposed), (x_q, x_transposed) = wgrad_operands(plan.spec, dy, x, key=key)
    dtype = operand_dtype(plan.machine, dy_q, x_q)
    dy_d, x_d = decode(dy_q, dtype), decode(x_q, dtype)
    dw = kernels.grouped_outer(
        dy_d.operand.T if dy_transposed else dy_d.operand,
        x_d.operand.T if x_transposed else x_d.operand,
        group_sizes,
    )  # [E, N, K]
    if dy_d.outer_scale is not None:
        dw = dw * dy_d.outer_scale.reshape(1, -1, 1)
    if x_d.outer_scale is not None:
        dw = dw * x_d.outer_scale.reshape(1, 1, -1)
    return dw


def _times_scales(y: Array, x: Prepared, w: Prepared, group_sizes: Array) -> Array:
    """Applies the row scales of x and those of each row's expert, [E] or [E, n, 1]."""
    if x.outer_scale is not None:
        y = y * x.outer_scale
    if w.outer_scale is None:
        return y
    scales = w.outer_scale.reshape(group_sizes.shape[0], -1)  # [E, 1 or n]
    expert = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(y.shape[0]), side="right")
    return y * scales[jnp.minimum(expert, group_sizes.shape[0] - 1)]
