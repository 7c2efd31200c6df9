"""The quantized matmul y = x @ w.T: one forward and two gradient products, spelled out.

Weights are [N, K] = [out, in]. The three products and what each backward mode feeds them
(Q: quantized and decoded exactly; its blocks run along the axis that is contracted):

    mode            fwd: x, w      dgrad: dy, w          wgrad: dy, x
    dequantized     Q(x), Q(w)     dy, Q(w) of fwd       dy, Q(x) of fwd
    high_precision  Q(x), Q(w)     dy, w                 dy, x
    reused          Q(x), Q(w)     Q_n(dy), Q(w) of fwd  Q_m(dy), Q(x) of fwd
    requantized     Q(x), Q(w)     Q_n(dy), Q_n(w)       Q_m(dy), Q_m(x)

Every gradient passes straight through the quantizers (METHODS 1.2, 3.1): dw is the gradient at
the quantized weight, dx the one at the quantized activation. An operand without a quantizer is
used as it is.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.operands import FLOAT32, Prepared, decode, is_narrow, operand_dtype
from fp4rl_jax.ops.spec import HIGH_PRECISION, MatmulSpec, Order
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer

Operand = Array | QTensor | Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static argument of the custom_vjp."""

    spec: MatmulSpec
    order: Order
    out_dtype: str
    machine: Machine


def matmul(
    x: Array,
    w: Operand,
    spec: MatmulSpec = HIGH_PRECISION,
    *,
    order: Order = "free",
    key: Array | None = None,
    hint: PyTree = None,
    out_dtype: jnp.dtype | None = None,
) -> Array:
    """Multiplies activations by a weight, quantizing both as `spec` says.

    Args:
        x: [..., K] bfloat16 or float32.
        w: [N, K]: an array in its master dtype (it is quantized here, or rounded to x's dtype
            where `spec.weight` is None), a published QTensor, or a Prepared. Only an array gets
            a gradient.
        spec: static; what happens to the operands.
        order: "free", or "fixed" for rows that do not depend on how many there are (CPU).
        key: typed PRNG key of the stochastic quantizers, an array leaf of the vjp.
        hint: what a guided activation quantizer looks at, in the layout of x.
        out_dtype: of the result; x's by default. Accumulation is float32 in any case.

    Returns:
        [..., N] out_dtype.

    Raises:
        ValueError: the contracted sizes differ.

    Exact: an array w gives the bits that `quantize(w)` gives; products of quantized operands are
        exact, so only the order of the float32 sum differs from a native FP4 matmul.
    """
    if x.shape[-1] != w.shape[-1] or w.ndim != 2:
        raise ValueError(f"x {x.shape} and w {w.shape} do not form [..., K] @ [N, K].T")
    plan = Plan(
        spec=spec,
        order=order,
        out_dtype=jnp.dtype(out_dtype or x.dtype).name,
        machine=machines.current(),
    )
    return _matmul(plan, x, w, key, hint)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(plan: Plan, x: Array, w: Operand, key: Array | None, hint: PyTree) -> Array:
    return _forward(plan, x, w, key, hint)[0]


def quantize_operands(
    spec: MatmulSpec, x: Array, w: Operand, key: Array | None, hint: PyTree
) -> tuple[Operand, Operand]:
    """Quantizes x (all its rows at once) and, unless it was published already, w."""
    if spec.act is not None:
        x_q = spec.act.quantize(x, axis=-1, key=fold_key(key, 0), hint=hint)
    else:
        x_q = x
    if isinstance(w, QTensor | Prepared):
        return x_q, w
    if spec.weight is not None:
        return x_q, quantize_weight(w, spec.weight, key=fold_key(key, 1))
    return x_q, w.astype(x.dtype)


def quantize_weight(w: Array, quantizer: Quantizer, *, key: Array | None = None) -> QTensor:
    """Quantizes a weight, or a stack of weights, along its last axis.

    The trainer's matmul and the publishing of rollout weights both call this one function. Every
    [N, K] matrix of a stack (layers, experts) gets an outer scale of its own.

    Args:
        w: [..., N, K] in the master dtype.
        quantizer: of the weight.
        key: for a stochastic quantizer; every matrix gets its own.

    Returns:
        QTensor of shape [..., N, K].
    """
    if w.ndim == 2:
        return quantizer.quantize(w, axis=-1, key=key)
    if key is None:
        return jax.vmap(lambda part: quantize_weight(part, quantizer))(w)
    keys = jax.random.split(key, w.shape[0])
    return jax.vmap(lambda part, k: quantize_weight(part, quantizer, key=k))(w, keys)


def _forward(plan: Plan, x: Array, w: Operand, key: Array | None, hint: PyTree):
    x_q, w_q = quantize_operands(plan.spec, x, w, key, hint)
    dtype = operand_dtype(plan.machine, x_q, w_q)
    x_d, w_d = decode(x_q, dtype), decode(w_q, dtype)
    y = _contract(plan, flatten(x_d), w_d, dims=(1, 1))
    y = y.astype(plan.out_dtype).reshape(*x.shape[:-1], -1)
    return y, (x_d, w_d)


def _matmul_fwd(plan: Plan, x: Array, w: Operand, key: Array | None, hint: PyTree):
    y, (x_d, w_d) = _forward(plan, x, w, key, hint)
    spec, published = plan.spec, isinstance(w, QTensor | Prepared)
    original = spec.backward in ("high_precision", "requantized")
    x_saved = x if original or spec.act is None else x_d
    w_saved = w if not published and (original or spec.weight is None) else w_d
    empty = (jnp.zeros((0,), x.dtype), None if published else jnp.zeros((0,), w.dtype))
    return y, (
        None if published else x_saved,
        w_saved,
        empty,
        key,
    )  # published: no gradient to w


def _matmul_bwd(plan: Plan, saved, dy: Array):
    x, w, (x_like, w_like), key = saved
    dy2 = dy.reshape(-1, dy.shape[-1])  # [M, N]
    dx = _dgrad(plan, dy2, w, fold_key(key, 2))
    dx = dx.astype(x_like.dtype).reshape(*dy.shape[:-1], -1)
    if w_like is None:
        return dx, None, None, None
    dw = _wgrad(plan, dy2, x, fold_key(key, 3))
    return dx, dw.astype(w_like.dtype), None, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _dgrad(plan: Plan, dy: Array, w: Operand, key: Array | None) -> Array:
    """dy [M, N] times w [N, K], contracting N."""
    spec = plan.spec
    dy_q: Operand = dy if spec.grad is None else spec.grad.quantize(dy, axis=-1, key=key)
    if spec.backward == "requantized" and spec.weight is not None and not isinstance(w, QTensor | Prepared):
        w_q = spec.weight.quantize(w.T, axis=-1)  # [K, N], blocks along N
        return _product(plan, (dy_q, w_q), dims=(1, 1))
    return _product(plan, (dy_q, rounded(w, dy.dtype)), dims=(1, 0))


def _wgrad(plan: Plan, dy: Array, x: Operand, key: Array | None) -> Array:
    """dy [M, N] times x [M, K], contracting M."""
    spec, free = (
        plan.spec,
        dataclasses.replace(plan, order="free"),
    )  # a sum over rows by nature
    x = flatten(x)
    dy_q: Operand = dy if spec.grad is None else spec.grad.quantize(dy.T, axis=-1, key=key)
    dy_axis = 0 if spec.grad is None else 1
    if spec.backward == "requantized" and spec.act is not None and not isinstance(x, Prepared):
        x_q = spec.act.quantize(x.T, axis=-1)  # [K, M], blocks along M
        return _product(free, (dy_q, x_q), dims=(dy_axis, 1))
    return _product(free, (dy_q, x), dims=(dy_axis, 0))


def rounded(w: Operand, dtype: jnp.dtype) -> Operand:
    """A master weight rounded to the activations' dtype, as the forward product rounds it."""
    return w if isinstance(w, QTensor | Prepared) else w.astype(dtype)


def _product(plan: Plan, operands: tuple[Operand, Operand], *, dims: tuple[int, int]) -> Array:
    folded = tuple(fold_outer(op, axis) for op, axis in zip(operands, dims, strict=True))
    dtype = operand_dtype(plan.machine, *folded)
    return _contract(plan, decode(folded[0], dtype), decode(folded[1], dtype), dims=dims)


def fold_outer(operand: Operand, axis: int) -> Operand:
    """Multiplies row scales into the values where the rows themselves are contracted."""
    if not isinstance(operand, Prepared) or axis == 1 or not by_row(operand):
        return operand
    values = operand.operand.astype(FLOAT32) * operand.outer_scale
    if operand.exact and is_narrow(operand):  # power-of-two scales keep 8 significant bits
        return Prepared(operand=values.astype(jnp.bfloat16), source=operand.source)
    return Prepared(operand=values, source="float32", exact=False)


def by_row(operand: Prepared) -> bool:
    """Whether every row of the operand has an outer scale of its own."""
    scale = operand.outer_scale
    return scale is not None and scale.ndim == operand.ndim and math.prod(scale.shape[:-1]) > 1


def _contract(plan: Plan, x: Prepared, w: Prepared, *, dims: tuple[int, int]) -> Array:
    """One dot and the outer scales that remain, x's first."""
    y = kernels.matmul(x.operand, w.operand, dims=dims, order=plan.order)
    if x.outer_scale is not None:
        y = y * (x.outer_scale.reshape(-1, 1) if by_row(x) else x.outer_scale.reshape(()))
    if w.outer_scale is not None:
        y = y * (w.outer_scale.reshape(1, -1) if by_row(w) else w.outer_scale.reshape(()))
    return jax.lax.optimization_barrier(y) if plan.order == "fixed" else y


def flatten(x: Operand) -> Operand:
    """[..., K] operands as [M, K]; row scales as [M, 1]."""
    if isinstance(x, Prepared):
        rows = math.prod(x.operand.shape[:-1])
        scale = x.outer_scale if x.outer_scale is None or not by_row(x) else x.outer_scale.reshape(rows, 1)
        return x.replace(operand=x.operand.reshape(rows, -1), outer_scale=scale)
    return x.reshape(-1, x.shape[-1])


def fold_key(key: Array | None, number: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, number)
