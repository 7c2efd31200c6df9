"""Matmul operands: exactly decoded values, with the outer scale kept apart.

An element times its block scale has at most 8 significant bits in every format, so it is exact
in bfloat16 and in float32; the outer scale is applied after the float32 accumulation. Only a
format whose outer scale differs inside a row (FP8 with block_size=128) must be dequantized to
float32 first.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.qtensor import QTensor

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
    source: str = struct.field(pytree_node=False, default="")
    exact: bool = struct.field(pytree_node=False, default=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return self.operand.shape

    @property
    def ndim(self) -> int:
        """Axes of the operand."""
        return self.operand.ndim


def is_narrow(operand: "Array | QTensor | Prepared") -> bool:
    """Whether the operand's values (block scales applied) are exact in bfloat16."""
    if isinstance(operand, QTensor):
        return not _scales_inside_rows(operand)
    dtype = operand.operand.dtype if isinstance(operand, Prepared) else operand.dtype
    if isinstance(operand, Prepared) and operand.source not in ("", "float32"):
        return True
    return dtype == BFLOAT16


def operand_dtype(machine: Machine, *operands: "Array | QTensor | Prepared") -> jnp.dtype:
    """The dtype of one dot: float32 if any operand needs it, else the machine's choice."""
    if all(is_narrow(operand) for operand in operands):
        return jnp.dtype(machine.narrow)
    return FLOAT32


def decode(operand: "Array | QTensor | Prepared", dtype: jnp.dtype) -> Prepared:
    """Gives any operand as dense values of `dtype` and an outer scale.

    Exact: the values are not rounded; `operand_dtype` never asks for a dtype too small for them.
    """
    if isinstance(operand, Prepared):
        return operand.replace(operand=operand.operand.astype(dtype))
    if not isinstance(operand, QTensor):
        return Prepared(operand=operand.astype(dtype), source=jnp.dtype(operand.dtype).name)
    name = operand.fmt.name
    if _scales_inside_rows(operand):
        return Prepared(operand=operand.dequantize(dtype), source="float32", exact=False)
    return Prepared(
        operand=operand.inner(dtype),
        outer_scale=operand.outer_scale,
        source=name,
        exact=operand.fmt.outer_is_power_of_two,
    )


def _scales_inside_rows(q: QTensor) -> bool:
    """Whether the outer scale differs along the contracted axis."""
    scale = q.outer_scale
    return scale is not None and scale.ndim == len(q.shape) and scale.shape[-1] > 1


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
    return decode(weight, operand_dtype(machine or machines.current(), weight))


def _is_weight(leaf: "Array | QTensor | Prepared") -> bool:
    if isinstance(leaf, QTensor):
        return True
    return not isinstance(leaf, Prepared) and leaf.ndim >= 3 and leaf.dtype == BFLOAT16
