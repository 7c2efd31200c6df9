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

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer

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
    values, outer_scale = quantizer.inner(x, dtype=dtype, axis=-1, key=key, hint=hint)
    return Prepared(operand=values, outer_scale=outer_scale, source=fmt.name, exact=fmt.outer_is_power_of_two)


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
    bfloat16 array of three or more axes (a stacked weight); everything else passes through.
    Call it inside the sampler's program, before its loop.

    Returns:
        A tree of the same structure whose weights `matmul` and `grouped_matmul` accept.

    Exact: `matmul(x, prepare(w), spec)` equals `matmul(x, w, spec)` bit for bit.
    """
    machine = machines.current()
    return jax.tree.map(
        lambda leaf: prepare_weight(leaf, machine) if _is_weight(leaf) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, QTensor | Prepared),
    )


def prepare_weight(weight: "Array | QTensor", machine: Machine | None = None) -> Prepared:
    """`prepare` of one weight [..., N, K], whatever its number of axes."""
    machine = machine or machines.current()
    natives = kernels.hardware_dtypes(machine)
    return decode(weight, operand_dtype(machine, weight, natives=natives))


def _is_weight(leaf: "Array | QTensor | Prepared") -> bool:
    if isinstance(leaf, QTensor):
        return True
    return not isinstance(leaf, Prepared) and leaf.ndim >= 3 and leaf.dtype == BFLOAT16
