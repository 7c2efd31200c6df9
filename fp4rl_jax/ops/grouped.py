"""The quantized matmul of a mixture of experts: one weight for each run of sorted rows.

Backward: the modes of `matmul` (see the table there). Where wgrad quantizes along the rows, a
block at the border of two experts holds rows of both, unless `rotation` is on: then every expert's
rows begin at a multiple of 16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.matmul import (
    Operand,
    Plan,
    check_calibrated,
    decoded_operands,
    dgrad_operands,
    fold_key,
    to_save,
    unrotated,
    wgrad_operands,
)
from fp4rl_jax.ops.operands import Calibrated, Prepared, decode, operand_dtype
from fp4rl_jax.ops.rounding import settle
from fp4rl_jax.ops.spec import HIGH_PRECISION, MatmulSpec, Order
from fp4rl_jax.quantizers import hadamard
from fp4rl_jax.quantizers.residual import placed


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
    check_calibrated(spec, w)
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
    x_d, r_d, w_d = operands = decoded_operands(plan, x, w, key=key, hint=hint)
    assert isinstance(w_d, Prepared)
    y = _scaled_product(plan, x_d, w_d, group_sizes)
    if r_d is not None:
        if r_d.shape[-1] < x.shape[-1]:
            assert isinstance(w, Calibrated) and w.columns is not None
            r_d = dataclasses.replace(r_d, operand=placed(r_d.operand, w.columns, x.shape))
        y = y + _scaled_product(plan, r_d, w_d, group_sizes)
    if plan.order == "fixed":
        y = jax.lax.optimization_barrier(y)
    return settle(y, jnp.dtype(plan.out_dtype)), operands


def _scaled_product(plan: Plan, x: Prepared, w: Prepared, group_sizes: Array) -> Array:
    """One grouped product with all its scales, [M, N] float32."""
    y = kernels.grouped_matmul(x.operand, w.operand, group_sizes, order=plan.order)
    y = _times_scales(y, x, w, group_sizes)
    return jax.lax.optimization_barrier(y) if plan.order == "fixed" else y


def _fwd(plan: Plan, x: Array, w: Operand, group_sizes: Array, key, hint):
    y, decoded = _forward(plan, x, w, group_sizes, key, hint)
    return y, (to_save(plan.spec, x, w, decoded=decoded), group_sizes, key)


def _bwd(plan: Plan, residuals, dy: Array):
    saved, group_sizes, key = residuals
    dx = unrotated(plan.spec.weight, saved.w, _dgrad(plan, dy, saved.w, group_sizes, fold_key(key, 2)))
    dx = settle(dx, saved.x_like.dtype)
    if saved.w_like is None:
        return dx, None, None, None, None
    dw = unrotated(plan.spec.act, saved.x, _wgrad(plan, dy, saved.x, group_sizes, fold_key(key, 3)))
    return dx, settle(dw, saved.w_like.dtype), None, None, None


_grouped.defvjp(_fwd, _bwd)


def _dgrad(plan: Plan, dy: Array, w: Array | Prepared, group_sizes: Array, key: Array | None) -> Array:
    dy_q, w_q, transposed = dgrad_operands(plan.spec, dy, w, key=key)
    dtype = operand_dtype(plan.machine, dy_q, w_q)
    dy_d, w_d = decode(dy_q, dtype), decode(w_q, dtype)
    dx = kernels.grouped_matmul(dy_d.operand, w_d.operand, group_sizes, axis=1 + transposed, order=plan.order)
    return _times_scales(dx, dy_d, w_d, group_sizes)


def aligned_groups(group_sizes: Array, num_rows: int, run: int) -> tuple[Array, Array, int]:
    """Where rows go so that every group begins at a multiple of `run`.

    Args:
        group_sizes: [E] int32. num_rows: M, static. run: length that no group may share.

    Returns:
        places [M] int32 of the sorted rows (rows of no group go past the end), the padded sizes
        [E] int32, and the static number of rows that holds them.
    """
    padded = -(-group_sizes // run) * run
    starts, moved = jnp.cumsum(group_sizes) - group_sizes, jnp.cumsum(padded) - padded
    rows = jnp.arange(num_rows)
    group = jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right")
    inside = jnp.minimum(group, group_sizes.shape[0] - 1)
    total = -(-num_rows // run) * run + run * group_sizes.shape[0]
    places = jnp.where(group < group_sizes.shape[0], moved[inside] + rows - starts[inside], total)
    return places.astype(jnp.int32), padded.astype(jnp.int32), total


def _wgrad(plan: Plan, dy: Array, x: Array | Prepared, group_sizes: Array, key: Array | None) -> Array:
    if plan.spec.rotation != "none":  # a rotation must not mix the rows of two experts
        places, group_sizes, total = aligned_groups(group_sizes, dy.shape[0], hadamard.SIZE)
        dy, x = (jnp.zeros((total, a.shape[1]), a.dtype).at[places].set(a, mode="drop") for a in (dy, x))  # pyright: ignore[reportAttributeAccessIssue]
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
