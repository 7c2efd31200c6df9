"""Matmul operands: exactly decoded values, with the outer scale kept apart.

An element times its block scale has at most 8 significant bits in every format, so it is exact
in bfloat16 and in float32; the outer scale is applied after the float32 accumulation. Only a
format whose outer scale differs inside a row (FP8 with block_size=128) must be dequantized to
float32 first.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array, PyTree, as_rows
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.packing import Packed
from fp4rl_jax.ops.spec import MatmulSpec
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Nearest, Quantizer
from fp4rl_jax.quantizers.residual import ChannelStats, Columns, Residual

FLOAT32 = jnp.dtype(jnp.float32)
BFLOAT16 = jnp.dtype(jnp.bfloat16)


@struct.dataclass
class Prepared:
    """An operand ready for the dot: `value = operand * outer_scale`.

    Works under scan and vmap over leading axes (stacked layers, experts).

    Attributes:
        operand: [..., R, K] bfloat16 or float32, block scales applied, contracted axis last.
        outer_scale: float32, [...] for one scale a tensor, [..., R, 1] for one a row, or None.
        source: static, what it was made from ("nvfp4", "bfloat16", ...), for reports.
        exact: static, True if `operand * outer_scale` is exact in bfloat16 (power-of-two scales).
    """

    operand: Array
    outer_scale: Array | None = None
    source: str = struct.field(pytree_node=False, default="float32")
    exact: bool = struct.field(pytree_node=False, default=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return self.operand.shape

    @property
    def ndim(self) -> int:
        """Axes of the operand."""
        return self.operand.ndim


@struct.dataclass
class Split:
    """A prepared weight [..., N, K] cut into the columns that a residual uses and the others.

    Attributes:
        selected, rest: [..., N, k] and [..., N, K - k].
        columns, others: [..., k] and [..., K - k] int32, ascending: where they lie in K.
    """

    selected: Prepared
    rest: Prepared
    columns: Array
    others: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        (*lead, k), rest = self.selected.shape, self.rest.shape[-1]
        return (*lead, k + rest)

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return self.selected.ndim


@struct.dataclass
class Calibrated:
    """A published weight [..., N, K] and what calibration chose for its site's input.

    Attributes:
        weight: QTensor; `prepare` makes it a Prepared, or a Split where there are columns and the
            weight is no stack of experts; `pack_weight` makes it a Packed.
        columns: [..., k] int32, ascending: the columns of a static residual selection, or None.
        smoothing: [..., K] float32: what the input's channels are multiplied by (the weight's were
            divided by it before it was quantized), or None.
    """

    weight: "QTensor | Prepared | Split | Packed"
    columns: Array | None = None
    smoothing: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return self.weight.ndim


def split_columns(weight: Prepared, columns: Array) -> Split:
    """Cuts a prepared weight [..., N, K] at the given columns [..., k]; leading axes are shared.

    Exact: a column's values are copied, never changed.
    """
    if columns.ndim > 1:
        return jax.vmap(split_columns)(weight, columns)
    length = weight.shape[-1]
    dropped = jnp.zeros(length, bool).at[columns].set(True)
    others = jnp.argsort(dropped, stable=True)[: length - columns.shape[0]].astype(jnp.int32)

    def at(indices: Array) -> Prepared:
        return dataclasses.replace(weight, operand=jnp.take(weight.operand, indices, axis=-1))

    return Split(selected=at(columns), rest=at(others), columns=columns, others=others)


#: Whatever tells which values an operand holds.
Described = jax.ShapeDtypeStruct | Array | QTensor | Prepared | Quantizer


def is_narrow(operand: Described) -> bool:
    """Whether an operand's values, block scales applied, are exact in bfloat16.

    A quantizer answers for what it will make.
    """
    if isinstance(operand, QTensor | Quantizer):
        return operand.fmt.span != "block"
    if isinstance(operand, Prepared):
        return operand.source != FLOAT32.name
    return operand.dtype == BFLOAT16


def operand_dtype(machine: Machine, *operands: Described, natives: tuple[str, ...] = ()) -> jnp.dtype:
    """The dtype of one dot.

    The format's own where all operands share one of `natives`, float32 if any operand needs it,
    else the machine's choice for values of few bits.
    """
    shared = {_native(operand) for operand in operands}
    if len(shared) == 1 and shared <= set(natives):
        return jnp.dtype(shared.pop())
    if all(is_narrow(operand) for operand in operands):
        return jnp.dtype(machine.narrow)
    return FLOAT32


def _native(operand: Described) -> str | None:
    """The hardware dtype that holds the operand's values, if its format is one."""
    if isinstance(operand, QTensor | Quantizer):
        return operand.fmt.native if is_narrow(operand) else None
    if isinstance(operand, Prepared):
        return jnp.dtype(operand.operand.dtype).name
    return None


def decode(operand: "Array | QTensor | Prepared", dtype: jnp.dtype) -> Prepared:
    """Gives any operand as dense values of `dtype` and an outer scale.

    Exact: the values are not rounded; `operand_dtype` never asks for a dtype too small for them.
    """
    if isinstance(operand, Prepared):
        return dataclasses.replace(operand, operand=operand.operand.astype(dtype))
    if not isinstance(operand, QTensor):
        return Prepared(operand=operand.astype(dtype), source=jnp.dtype(operand.dtype).name)
    if not is_narrow(operand):
        return Prepared(operand=operand.dequantize(FLOAT32), source=FLOAT32.name)
    return Prepared(
        operand=operand.inner(dtype),
        outer_scale=operand.outer_scale,
        source=operand.fmt.name,
        exact=operand.fmt.outer_is_power_of_two,
    )


def encode(
    quantizer: Quantizer, x: Array, dtype: jnp.dtype, *, key: Array | None = None, hint: PyTree = None
) -> Prepared:
    """Quantizes along the last axis and decodes at once: `decode(quantizer.quantize(x), dtype)`.

    Exact: the same bits, without the packed codes in between.
    """
    fmt = quantizer.fmt
    if not is_narrow(quantizer):
        return decode(quantizer.quantize(x, axis=-1, key=key, hint=hint), dtype)
    rows, hint = stored_rows(x, hint)
    values, outer_scale = quantizer.inner(rows, dtype=dtype, axis=-1, key=key, hint=hint)
    if outer_scale is not None and outer_scale.ndim:
        outer_scale = outer_scale.reshape(*x.shape[:-1], 1)
    return Prepared(
        operand=values.reshape(x.shape),
        outer_scale=outer_scale,
        source=fmt.name,
        exact=fmt.outer_is_power_of_two,
    )


def stored_rows(x: Array, hint: PyTree) -> tuple[Array, PyTree]:
    """What is about to be quantized, and its hint, as rows [M, K]; x is stored.

    It is read for the maxima and again for the codes: what makes it would otherwise be computed for both,
    along axes that a CPU does not turn into vectors.
    """
    rows, hint = jax.tree.map(as_rows, (x, hint))
    return jax.lax.optimization_barrier(rows), hint


def unguided(quantizer: Quantizer) -> Quantizer:
    """The quantizer where there is no guidance: a guided one rounds to nearest, under scales of its own."""
    if not quantizer.rounding.borrows_scales:
        return quantizer
    return dataclasses.replace(quantizer, rounding=Nearest())


def encode_weight(quantizer: Quantizer, w: Array, dtype: jnp.dtype, *, key: Array | None = None) -> Prepared:
    """`encode` of a weight [N, K], or of a stack whose matrices have scales of their own."""
    return over_stack(lambda part, k: encode(quantizer, part, dtype, key=k), w, key)


def quantize_weight(w: Array, quantizer: Quantizer, *, key: Array | None = None) -> QTensor:
    """Quantizes a weight, or a stack of weights, along its last axis.

    The codes and scales are those that the trainer's matmul uses (`encode_weight`). Every [N, K]
    matrix of a stack (layers, experts) gets an outer scale of its own.

    Args:
        w: [..., N, K] in the master dtype.
        quantizer: of the weight.
        key: for a stochastic quantizer; every matrix gets its own.

    Returns:
        QTensor of shape [..., N, K].
    """
    return over_stack(lambda part, k: quantizer.quantize(part, axis=-1, key=k), w, key)


def calibrated_weight(w: Array, spec: MatmulSpec, stats: ChannelStats) -> Calibrated:
    """Quantizes a weight with what calibration says of its input.

    Args:
        w: [..., N, K] in the master dtype.
        spec: of the site; needs calibration and has a weight quantizer.
        stats: of the input, [..., K] leaves whose leading axes are w's first ones (a stack of
            experts shares one input).

    Returns:
        Calibrated: columns of the residual's selection, smoothing of SmoothQuant, and the weight.

    Raises:
        ValueError: the spec needs no calibration or quantizes no weight.
    """
    if not spec.needs_calibration or spec.weight is None:
        raise ValueError(f"nothing to calibrate in {spec}")
    columns = smoothing = None
    if spec.needs_columns:
        assert isinstance(spec.residual, Residual) and isinstance(spec.residual.selection, Columns)
        columns = spec.residual.selection.choose(stats, block=spec.residual.block)
    if spec.smoothing is not None:
        smoothing = smoothing_of(w, stats.act_max, alpha=spec.smoothing)
        w = smoothed_weight(w, smoothing)
    return Calibrated(weight=quantize_weight(w, spec.weight), columns=columns, smoothing=smoothing)


def smoothed_weight(w: Array, smoothing: Array) -> Array:
    """w [..., N, K] over the smoothing [..., K] of its input, in float32."""
    lead, missing = smoothing.shape[:-1], w.ndim - smoothing.ndim
    return w.astype(FLOAT32) / smoothing.reshape(*lead, *(1,) * missing, smoothing.shape[-1])


def smoothing_of(w: Array, act_max: Array, *, alpha: float) -> Array:
    """SmoothQuant's factors for the input's channels (arXiv 2211.10438, equation 4), inverted.

    s = amax(x)^alpha / amax(w)^(1 - alpha) a channel; 1 where either is zero.

    Args:
        w: [..., N, K]. act_max: [..., K] float32, leading axes as in `calibrated_weight`.
        alpha: 0 leaves the scales in the activation, 1 moves them all to the weight.

    Returns:
        [..., K] float32, 1 / s: what x is multiplied by.
    """
    axes = tuple(range(act_max.ndim - 1, w.ndim - 1))
    peak = jnp.max(jnp.abs(w.astype(FLOAT32)), axis=axes)
    alive = (peak > 0) & (act_max > 0)
    peak, act_max = (jnp.where(alive, a, 1.0) for a in (peak, act_max))
    return jnp.where(alive, peak ** (1 - alpha) / act_max**alpha, 1.0)


def over_stack[T](fn: Callable[[Array, Array | None], T], w: Array, key: Array | None) -> T:
    """Maps `fn(matrix, key)` over every axis of `w` before the last two."""
    if w.ndim == 2:
        return fn(w, key)
    if key is None:
        return jax.vmap(lambda part: over_stack(fn, part, None))(w)
    return jax.vmap(lambda part, k: over_stack(fn, part, k))(w, jax.random.split(key, w.shape[0]))


def prepare(tree: PyTree) -> PyTree:
    """Decodes published weights once, so that decode steps pay nothing for it.

    Every QTensor becomes a `Prepared` of the current machine's operand dtype, and so does every
    bfloat16 array of three or more axes (a stacked weight); everything else, what is packed
    for the kernels included, passes through. Call it inside the sampler's program, before its loop.

    Returns:
        A tree of the same structure whose weights `matmul` and `grouped_matmul` accept.

    Exact: `matmul(x, prepare(w), spec)` equals `matmul(x, w, spec)` bit for bit.
    """
    machine = machines.current()
    return jax.tree.map(
        lambda leaf: prepare_weight(leaf, machine) if _is_weight(leaf) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, QTensor | Prepared | Calibrated | Packed),
    )


def prepare_weight(
    weight: "Array | QTensor | Calibrated", machine: Machine | None = None
) -> "Prepared | Calibrated":
    """`prepare` of one weight [..., N, K], whatever its number of axes."""
    machine = machine or machines.current()
    natives = kernels.hardware_dtypes(machine)
    if isinstance(weight, Calibrated):
        return _prepare_calibrated(weight, machine)
    return decode(weight, operand_dtype(machine, weight, natives=natives))


def _prepare_calibrated(weight: Calibrated, machine: Machine) -> Calibrated:
    if not isinstance(weight.weight, QTensor):
        return weight
    prepared = prepare_weight(weight.weight, machine)
    assert isinstance(prepared, Prepared)
    columns = weight.columns
    grouped = columns is not None and prepared.ndim - columns.ndim > 1  # experts keep one weight
    whole = prepared.operand.dtype == FLOAT32  # there both terms are one operand, see `ops.matmul`
    if columns is None or grouped or whole:
        return dataclasses.replace(weight, weight=prepared)
    return dataclasses.replace(weight, weight=split_columns(prepared, columns))


def _is_weight(leaf: "Array | QTensor | Prepared | Calibrated | Packed") -> bool:
    if isinstance(leaf, QTensor | Calibrated):
        return True
    return not isinstance(leaf, Prepared | Packed) and leaf.ndim >= 3 and leaf.dtype == BFLOAT16
