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
    fold_key,
    fold_outer,
    quantize_operands,
    quantize_weight,
    rounded,
)
from fp4rl_jax.ops.operands import Prepared, decode, operand_dtype
from fp4rl_jax.ops.spec import HIGH_PRECISION, MatmulSpec, Order
from fp4rl_jax.qtensor import QTensor


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
    x_q, w_q = quantize_operands(plan.spec, x, w, key, hint)
    dtype = operand_dtype(plan.machine, x_q, w_q)
    x_d, w_d = decode(x_q, dtype), decode(w_q, dtype)
    y = kernels.grouped_matmul(x_d.operand, w_d.operand, group_sizes, order=plan.order)
    if x_d.outer_scale is not None:
        y = y * x_d.outer_scale
    y = _times_expert_scale(y, w_d, group_sizes)
    return y.astype(plan.out_dtype), (x_d, w_d)


def _fwd(plan: Plan, x: Array, w: Operand, group_sizes: Array, key, hint):
    y, (x_d, w_d) = _forward(plan, x, w, group_sizes, key, hint)
    spec, published = plan.spec, isinstance(w, QTensor | Prepared)
    original = spec.backward in ("high_precision", "requantized")
    x_saved = x if original or spec.act is None else x_d
    w_saved = w if not published and (original or spec.weight is None) else w_d
    empty = (jnp.zeros((0,), x.dtype), None if published else jnp.zeros((0,), w.dtype))
    return y, (None if published else x_saved, w_saved, empty, group_sizes, key)


def _bwd(plan: Plan, saved, dy: Array):
    x, w, (x_like, w_like), group_sizes, key = saved
    dx = _dgrad(plan, dy, w, group_sizes, fold_key(key, 2)).astype(x_like.dtype)
    if w_like is None:
        return dx, None, None, None, None
    dw = _wgrad(plan, dy, x, group_sizes, fold_key(key, 3)).astype(w_like.dtype)
    return dx, dw, None, None, None


_grouped.defvjp(_fwd, _bwd)


def _dgrad(plan: Plan, dy: Array, w: Operand, group_sizes: Array, key: Array | None) -> Array:
    spec = plan.spec
    dy_q = dy if spec.grad is None else spec.grad.quantize(dy, axis=-1, key=key)
    if spec.backward == "requantized" and spec.weight is not None and not isinstance(w, Prepared):
        w_q, axis = quantize_weight(jnp.swapaxes(w, 1, 2), spec.weight), 2
    else:
        w_q, axis = fold_outer(rounded(w, dy.dtype), 0), 1
    dtype = operand_dtype(plan.machine, dy_q, w_q)
    dy_d, w_d = decode(dy_q, dtype), decode(w_q, dtype)
    dx = kernels.grouped_matmul(dy_d.operand, w_d.operand, group_sizes, axis=axis, order=plan.order)
    if dy_d.outer_scale is not None:
        dx = dx * dy_d.outer_scale
    return _times_expert_scale(dx, w_d, group_sizes)


def _wgrad(plan: Plan, dy: Array, x: Operand, group_sizes: Array, key: Array | None) -> Array:
    spec = plan.spec
    dy_q = dy if spec.grad is None else spec.grad.quantize(dy.T, axis=-1, key=key)
    x_q = fold_outer(x, 0)
    if spec.backward == "requantized" and spec.act is not None and not isinstance(x, Prepared):
        x_q = spec.act.quantize(x.T, axis=-1)
    dtype = operand_dtype(plan.machine, dy_q, x_q)
    dy_d, x_d = decode(dy_q, dtype), decode(x_q, dtype)
    dy_rows = dy_d.operand if spec.grad is None else dy_d.operand.T
    x_rows = x_d.operand.T if isinstance(x_q, QTensor) else x_d.operand
    dw = kernels.grouped_outer(dy_rows, x_rows, group_sizes)  # [E, N, K]
    if dy_d.outer_scale is not None:
        dw = dw * dy_d.outer_scale.reshape(1, -1, 1)
    if x_d.outer_scale is not None:
        dw = dw * x_d.outer_scale.reshape(1, 1, -1)
    return dw


def _times_expert_scale(y: Array, w: Prepared, group_sizes: Array) -> Array:
    """Multiplies each row by the outer scale of its expert, [E] or [E, n, 1]."""
    if w.outer_scale is None:
        return y
    scales = w.outer_scale.reshape(group_sizes.shape[0], -1)  # [E, 1 or n]
    ends = jnp.cumsum(group_sizes)
    expert = jnp.searchsorted(ends, jnp.arange(y.shape[0]), side="right")
    return y * scales[jnp.minimum(expert, group_sizes.shape[0] - 1)]
