"""The quantized matmul y = x @ w.T: one forward and two gradient products, spelled out.

Weights are [N, K] = [out, in]. The three products and what each backward mode feeds them
(Q: quantized and decoded exactly; its blocks run along the axis that is contracted):

    mode            fwd: x, w      dgrad: dy, w          wgrad: dy, x
    dequantized     Q(x), Q(w)     dy, Q(w) of fwd       dy, Q(x) of fwd
    high_precision  Q(x), Q(w)     dy, w                 dy, x
    reused          Q(x), Q(w)     Q_n(dy), Q(w) of fwd  Q_m(dy), Q(x) of fwd
    requantized     Q(x), Q(w)     Q_n(dy), Q_n(w)       Q_m(dy), Q_m(x)

Every gradient passes straight through the quantizers (as QUADS, arXiv 2607.15810): dw is the gradient at
the quantized weight, dx the one at the quantized activation. An operand without a quantizer is
used as it is.

A residual (`spec.residual`) adds a second term in the forward, y = Q(x) Q(w)^T + r Q(w)^T, whose
weight is the first term's: one dot over the rows of both reads every decoded weight once.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.operands import (
    FLOAT32,
    Calibrated,
    Prepared,
    Split,
    decode,
    encode,
    encode_weight,
    is_narrow,
    operand_dtype,
    over_stack,
    split_columns,
    stored_rows,
    unguided,
)
from fp4rl_jax.ops.packed import packed_product
from fp4rl_jax.ops.packing import Packed
from fp4rl_jax.ops.rounding import settle
from fp4rl_jax.ops.spec import HIGH_PRECISION, MatmulSpec, Order
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer, hadamard

Plain = Array | QTensor | Prepared
Operand = Plain | Calibrated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static argument of the custom_vjp."""

    spec: MatmulSpec
    order: Order
    out_dtype: str
    machine: Machine
    natives: tuple[str, ...] = ()


def matmul(
    x: Array,
    w: Operand | Packed,
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
            where `spec.weight` is None), a published QTensor, a Prepared, a Packed or a Calibrated
            (which the forward alone takes). Only an array gets a gradient.
        spec: static; what happens to the operands.
        order: "free", or "fixed" for rows that do not depend on how many there are (CPU).
        key: typed PRNG key of the stochastic quantizers, an array leaf of the vjp.
        hint: what a guided activation quantizer looks at, in the layout of x; without one it rounds to
            nearest under its own scales.
        out_dtype: of the result; x's by default. Accumulation is float32 in any case.

    Returns:
        [..., N] out_dtype.

    Raises:
        ValueError: the contracted sizes differ, or the spec needs calibration that w lacks.

    Exact: an array w gives the bits that `quantize(w)` gives; products of quantized operands are
        exact, so only the order of the float32 sum differs from a native FP4 matmul.
    """
    if x.shape[-1] != w.shape[-1] or w.ndim != 2:
        raise ValueError(f"x {x.shape} and w {w.shape} do not form [..., K] @ [N, K].T")
    check_calibrated(spec, w)
    inner, smoothing = (w.weight, w.smoothing) if isinstance(w, Calibrated) else (w, None)
    if isinstance(inner, Packed):
        wanted = jnp.dtype(out_dtype or x.dtype)
        return packed_product(x, inner, spec, smoothing=smoothing, order=order, out_dtype=wanted)
    assert not isinstance(w, Packed)
    machine = machines.current()
    plan = Plan(
        spec=spec,
        order=order,
        out_dtype=jnp.dtype(out_dtype or x.dtype).name,
        machine=machine,
        natives=kernels.hardware_dtypes(machine),
    )
    return _matmul(plan, x, w, key, hint)


class Saved(NamedTuple):
    """Residuals of the vjp; `x_like` and `w_like` are empty arrays that carry dtypes."""

    x: Array | Prepared | None
    w: Array | Prepared
    x_like: Array
    w_like: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(plan: Plan, x: Array, w: Operand, key: Array | None, hint: PyTree) -> Array:
    return _forward(plan, x, w, key, hint)[0]


class Operands(NamedTuple):
    """What the forward multiplies: x, the second operand of a residual (or None), and w."""

    x: Prepared
    residual: Prepared | None
    w: Prepared | Split


def decoded_operands(plan: Plan, x: Array, w: Operand, *, key: Array | None, hint: PyTree) -> Operands:
    """The forward operands: x quantized (all its rows at once), and w unless it was published."""
    spec = plan.spec
    columns = w.columns if isinstance(w, Calibrated) else None
    if isinstance(w, Calibrated) and w.smoothing is not None:
        x = x.astype(FLOAT32) * w.smoothing
    bare = w.weight if isinstance(w, Calibrated) else w
    assert not isinstance(bare, Packed)  # never decoded
    w_d, dtype = _decoded_weight(plan, x, bare, key=fold_key(key, 1))
    if spec.act is None:
        return Operands(decode(x, dtype), None, w_d)
    act = spec.act if hint is not None else unguided(spec.act)
    if spec.residual is None:
        return Operands(encode(act, x, dtype, key=fold_key(key, 0), hint=hint), None, w_d)
    spec = dataclasses.replace(spec, act=act)
    both = _corrected(spec, x, dtype, columns=columns, key=fold_key(key, 0), hint=hint)
    return Operands(*both, w_d)


def _decoded_weight(
    plan: Plan, x: Array, w: Plain | Split, *, key: Array | None
) -> tuple[Prepared | Split, jnp.dtype]:
    """The weight as an operand, and the dtype of the dot."""
    spec = plan.spec
    described = w.selected if isinstance(w, Split) else w
    if isinstance(w, jax.Array) and spec.weight is not None:
        described = spec.weight
    elif isinstance(w, jax.Array):
        described = w = rounded(w, x.dtype)
    dtype = operand_dtype(plan.machine, spec.act or x, described, natives=plan.natives)
    if isinstance(w, Split):
        return w, dtype
    if isinstance(w, jax.Array) and spec.weight is not None:
        return encode_weight(spec.weight, w, dtype, key=key), dtype
    return decode(w, dtype), dtype


def _corrected(
    spec: MatmulSpec, x: Array, dtype: jnp.dtype, *, columns: Array | None, key: Array | None, hint: PyTree
) -> tuple[Prepared, Prepared]:
    """x quantized, [M, K], and the second operand, [M, K] or [M, k] at the given columns."""
    assert spec.act is not None and spec.residual is not None
    fmt = spec.act.fmt
    flat, hint = stored_rows(x, hint)
    parts = spec.residual.split(flat, spec.act, dtype=dtype, columns=columns, key=key, hint=hint)
    first, second = (
        Prepared(operand=values, outer_scale=outer, source=fmt.name, exact=fmt.outer_is_power_of_two)
        for values, outer in parts
    )
    return first, second


def check_calibrated(spec: MatmulSpec, w: Operand | Packed) -> None:
    """Refuses a weight that lacks what its spec chose at publish, or brings what the spec has no use for."""
    columns = isinstance(w, Calibrated) and w.columns is not None
    smoothing = isinstance(w, Calibrated) and w.smoothing is not None
    if (columns, smoothing) != (spec.needs_columns, spec.smoothing is not None):
        raise ValueError(
            f"the spec has residual={spec.residual} and smoothing={spec.smoothing}, but the weight comes"
            f" with{'' if columns else 'out'} columns and with{'' if smoothing else 'out'} smoothing:"
            " publish with the calibration of this site (rollout.publish)"
        )


def _forward(plan: Plan, x: Array, w: Operand, key: Array | None, hint: PyTree):
    x_d, r_d, w_d = operands = decoded_operands(plan, x, w, key=key, hint=hint)
    if r_d is None:
        assert isinstance(w_d, Prepared)
        y = _contract(plan, flatten(x_d), w_d, dims=(1, 1))
    elif isinstance(w_d, Prepared) and sums_exactly(plan.spec, x, x_d):
        columns = w.columns if isinstance(w, Calibrated) else None
        y = _contract(plan, summed(flatten(x_d), r_d, columns), w_d, dims=(1, 1))
    else:
        if not isinstance(w_d, Split) and r_d.shape[-1] < w_d.shape[-1]:
            assert isinstance(w, Calibrated) and w.columns is not None
            w_d = split_columns(w_d, w.columns)
        y = _two_terms(plan, flatten(x_d), r_d, w_d)
    y = settle(y, jnp.dtype(plan.out_dtype)).reshape(*x.shape[:-1], -1)
    return y, operands


def _two_terms(plan: Plan, x: Prepared, r: Prepared, w: Prepared | Split) -> Array:
    """x w^T + r w^T: one dot over the rows of both, so that each decoded weight is used once.

    Where r lives on some columns only, that dot takes those columns and a second one x's others.
    """
    rows = x.shape[0]

    def dot(a: Array, b: Prepared) -> Array:
        return kernels.matmul(a, b.operand, dims=(1, 1), order=plan.order)

    if isinstance(w, Split):
        own, others = (jnp.take(x.operand, c, axis=-1) for c in (w.columns, w.others))
        # fenced: XLA on a CPU rewrites a dot of two gathers into a bfloat16 dot that it cannot run
        own, others = jax.lax.optimization_barrier((own, others))
        both = dot(jnp.concatenate([own, r.operand]), w.selected)
        first, second = both[:rows], both[rows:]
        first = first + dot(others, w.rest) if w.rest.shape[-1] else first
        outer = w.selected.outer_scale
    else:
        both = dot(jnp.concatenate([x.operand, r.operand]), w)
        first, second, outer = both[:rows], both[rows:], w.outer_scale
    return add_terms(plan, (first, x), (second, r), outer)


def sums_exactly(spec: MatmulSpec, x: Array, operand: Prepared) -> bool:
    """Whether the operand of x and the second one may be one, of float32."""
    assert spec.act is not None and spec.residual is not None
    plain = spec.smoothing is None and operand.operand.dtype == FLOAT32
    return plain and spec.residual.sums_exactly(x.dtype, spec.act)


def summed(x: Prepared, r: Prepared, columns: Array | None) -> Prepared:
    """x + r as one operand [M, K] float32 under x's outer scale, so that one product does for both terms.

    Exact (see `Correction.sums_exactly`): only the order of the product's float32 sum differs from that of
    two products.
    """
    second = r.operand
    if r.outer_scale is not None:
        second = second * (r.outer_scale if x.outer_scale is None else r.outer_scale / x.outer_scale)
    elif x.outer_scale is not None:
        second = second / x.outer_scale
    if columns is not None:  # a gather of values and zeros, which a CPU does faster than a scatter
        k = columns.shape[-1]
        place = jnp.full(x.shape[-1], k, jnp.int32).at[columns].set(jnp.arange(k, dtype=jnp.int32))
        second = jnp.take(jnp.pad(second, ((0, 0), (0, 1))), place, axis=-1)
    return dataclasses.replace(x, operand=x.operand + second)


def add_terms(
    plan: Plan, first: tuple[Array, Prepared], second: tuple[Array, Prepared], w_outer: Array | None
) -> Array:
    """Gives both products their activation's scale, adds them, and applies the weight's."""
    y, z = (
        product if operand.outer_scale is None else product * operand.outer_scale
        for product, operand in (first, second)
    )
    if plan.order == "fixed":  # or a product may contract with the sum
        y, z = jax.lax.optimization_barrier((y, z))
    y = _times_outer(y + z, w_outer)
    return jax.lax.optimization_barrier(y) if plan.order == "fixed" else y


def to_save(spec: MatmulSpec, x: Array, w: Operand, *, decoded: Operands) -> Saved:
    """What the backward needs of x and w, as its mode asks; a published w gets no gradient.

    Raises:
        ValueError: w is Calibrated: it belongs to a rollout, which is never differentiated.
    """
    if isinstance(w, Calibrated):
        raise ValueError("a calibrated weight is the rollout's: it is never differentiated")
    published = isinstance(w, QTensor | Prepared)
    original = spec.backward in ("high_precision", "requantized")
    x_saved = x if original or spec.act is None else decoded.x
    w_saved = w if not published and (original or spec.weight is None) else decoded.w
    assert not isinstance(w_saved, Split)  # only a Calibrated weight is split
    return Saved(
        x=None if published else x_saved,
        w=w_saved,
        x_like=jnp.zeros((0,), x.dtype),
        w_like=None if published else jnp.zeros((0,), w.dtype),
    )


def _matmul_fwd(plan: Plan, x: Array, w: Operand, key: Array | None, hint: PyTree):
    y, decoded = _forward(plan, x, w, key, hint)
    return y, (to_save(plan.spec, x, w, decoded=decoded), key)


def _matmul_bwd(plan: Plan, residuals, dy: Array):
    saved, key = residuals
    dy2 = dy.reshape(-1, dy.shape[-1])  # [M, N]
    dx = unrotated(plan.spec.weight, saved.w, _dgrad(plan, dy2, saved.w, fold_key(key, 2)))
    dx = settle(dx, saved.x_like.dtype).reshape(*dy.shape[:-1], -1)
    if saved.w_like is None:
        return dx, None, None, None
    dw = unrotated(plan.spec.act, saved.x, _wgrad(plan, dy2, saved.x, fold_key(key, 3)))
    return dx, settle(dw, saved.w_like.dtype), None, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def unrotated(quantizer: Quantizer | None, operand: Array | Prepared | None, gradient: Array) -> Array:
    """A gradient [..., K] float32 taken at a rotated operand, turned back to the operand's own space."""
    if quantizer is None or quantizer.rotation == "none" or not isinstance(operand, Prepared):
        return gradient
    return hadamard.unrotate(gradient)


def quantized_along(
    quantizer: Quantizer | None, x: Array, *, key: Array | None = None
) -> tuple[Array | QTensor, bool]:
    """x [R, S] quantized along its first axis, transposed to [S, R]; or x itself and False.

    Guidance describes blocks along the other axis, so a guided quantizer rounds to nearest here.
    """
    if quantizer is None:
        return x, False
    plain = unguided(quantizer)
    return over_stack(
        lambda part, k: plain.quantize(part, axis=-1, key=k), jnp.swapaxes(x, -1, -2), key
    ), True


def dgrad_operands(spec: MatmulSpec, dy: Array, w: Array | Prepared, *, key: Array | None):
    """dy [M, N] and w for dx = dy @ w, and whether w came transposed (blocks along N)."""
    dy_q = dy if spec.grad is None else spec.grad.quantize(dy, axis=-1, key=fold_key(key, 0))
    if isinstance(w, Prepared):
        return dy_q, fold_outer(w), False
    if spec.backward == "requantized" and spec.weight is not None:
        return dy_q, *quantized_along(spec.weight, w, key=fold_key(key, 1))
    return dy_q, rounded(w, dy.dtype), False  # rounded as the forward product rounds it


def wgrad_operands(spec: MatmulSpec, dy: Array, x: Array | Prepared, *, key: Array | None):
    """dy and x for dw = dy.T @ x, each with whether it came transposed (blocks along M)."""
    if spec.rotation != "none":
        assert not isinstance(x, Prepared)  # backward is "requantized": x is the original
        dy, x = rotated_rows(dy), rotated_rows(x.reshape(-1, x.shape[-1]))
    dy_q = quantized_along(spec.grad, dy, key=fold_key(key, 0))
    if isinstance(x, Prepared):
        return dy_q, (fold_outer(flatten(x)), False)
    x = x.reshape(-1, x.shape[-1])
    return dy_q, quantized_along(
        spec.act if spec.backward == "requantized" else None, x, key=fold_key(key, 1)
    )


def rotated_rows(x: Array) -> Array:
    """[M, S] rotated along its rows, in float32; zero rows fill the last run of 16."""
    padded = jnp.pad(x.astype(FLOAT32), ((0, -x.shape[0] % hadamard.SIZE), (0, 0)))
    return hadamard.rotate(padded, axis=0)


def _dgrad(plan: Plan, dy: Array, w: Array | Prepared, key: Array | None) -> Array:
    """dy [M, N] times w [N, K], contracting N."""
    dy_q, w_q, transposed = dgrad_operands(plan.spec, dy, w, key=key)
    return _product(plan, dy_q, w_q, dims=(1, int(transposed)))


def _wgrad(plan: Plan, dy: Array, x: Array | Prepared, key: Array | None) -> Array:
    """dy [M, N] times x [M, K], contracting M: a sum over rows, so its order is always free."""
    (dy_q, dy_transposed), (x_q, x_transposed) = wgrad_operands(plan.spec, dy, x, key=key)
    free = dataclasses.replace(plan, order="free")
    return _product(free, dy_q, x_q, dims=(int(dy_transposed), int(x_transposed)))


def _product(plan: Plan, a: Plain, b: Plain, *, dims: tuple[int, int]) -> Array:
    dtype = operand_dtype(plan.machine, a, b)
    return _contract(plan, decode(a, dtype), decode(b, dtype), dims=dims)


def fold_outer(operand: Prepared) -> Prepared:
    """Multiplies row scales into the values, for a product that contracts the rows."""
    if operand.outer_scale is None or not by_row(operand):
        return operand
    values = operand.operand.astype(FLOAT32) * operand.outer_scale
    if operand.exact and is_narrow(operand):  # power-of-two scales keep 8 significant bits
        return Prepared(operand=values.astype(operand.operand.dtype), source=operand.source)
    return Prepared(operand=values)


def by_row(operand: Prepared) -> bool:
    """Whether every row of the operand has an outer scale of its own."""
    return operand.outer_scale is not None and operand.outer_scale.ndim == operand.ndim


def _contract(plan: Plan, x: Prepared, w: Prepared, *, dims: tuple[int, int]) -> Array:
    """One dot and the outer scales that remain, x's first."""
    y = kernels.matmul(x.operand, w.operand, dims=dims, order=plan.order)
    if x.outer_scale is not None:
        y = y * (x.outer_scale.reshape(-1, 1) if by_row(x) else x.outer_scale.reshape(()))
    y = _times_outer(y, w.outer_scale)
    return jax.lax.optimization_barrier(y) if plan.order == "fixed" else y


def _times_outer(y: Array, outer: Array | None) -> Array:
    """A product [M, N] times the outer scale of a weight [N, K]: [], or [N, 1], or none.

    The scale is stored: sliced out of its stack inside the loop over values, it keeps a CPU from vectors.
    """
    if outer is None:
        return y
    return y * jax.lax.optimization_barrier(outer.reshape(1, -1) if outer.ndim == 2 else outer.reshape(()))


def flatten(x: Prepared) -> Prepared:
    """[..., K] as [M, K], row scales as [M, 1]."""
    rows = math.prod(x.shape[:-1])
    scale = x.outer_scale
    if scale is not None and by_row(x):
        scale = scale.reshape(rows, 1)
    return Prepared(operand=x.operand.reshape(rows, -1), outer_scale=scale, source=x.source, exact=x.exact)


def rounded(w: Array, dtype: jnp.dtype) -> Array:
    """A master weight rounded to the activations' dtype."""
    return w if w.dtype == dtype else settle(w.astype(FLOAT32), dtype)


def fold_key(key: Array | None, number: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, number)
