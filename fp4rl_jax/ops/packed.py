"""The product with a weight that stays packed: quantize in the kernel's order, then one matmul.

The codes, the block scales and the operands' values are those of the other forms of a weight; only the
order of the float32 sum differs, within `pallas_kernels.testing.accumulation_bound`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, as_rows
from fp4rl_jax.ops import kernels
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.operands import FLOAT32, Calibrated
from fp4rl_jax.ops.packing import Packed, matmul_facts, pack, refusal, take_blocks, task_of
from fp4rl_jax.ops.rounding import settle
from fp4rl_jax.ops.spec import MatmulSpec, Order, Side
from fp4rl_jax.qtensor import QTensor


def pack_weight(weight: Any, *, site: str, side: Side) -> Any:
    """A site's published weight, packed where the current machine has kernels for it; else as it came.

    Args:
        weight: QTensor or Calibrated of [..., N, K], or what else a tree may hold there.
        site: its name. side: the rollout's.
    """
    q = weight.weight if isinstance(weight, Calibrated) else weight
    if not isinstance(q, QTensor) or not stays_packed(q, site=site, side=side):
        return weight
    if not isinstance(weight, Calibrated):
        return pack(q, layout=side.layout)
    packed = pack(q, columns=weight.columns, layout=side.layout)
    return dataclasses.replace(weight, weight=packed)


def stays_packed(q: QTensor, *, site: str, side: Side) -> bool:
    """Whether a site's published weight [..., N, K] stays packed in programs on the current machine."""
    n, k = q.shape[-2:]
    return refusal(site, side.specs[site], side, shape=(n, k), machine=machines.current()) is None


def packed_product(
    x: Array,
    w: Packed,
    spec: MatmulSpec,
    *,
    smoothing: Array | None = None,
    order: Order = "free",
    out_dtype: jnp.dtype,
) -> Array:
    """x w^T under a spec that `packing.refusal` does not refuse; on a mesh, every device its own rows.

    Args:
        x: [..., K] bfloat16, or float32 where the spec quantizes it.
        w: [N, K]. smoothing: [K] float32 that x is multiplied by, or None.
        order, out_dtype: as in `ops.matmul`.

    Returns:
        [..., N] out_dtype. Never differentiated: a packed weight is the rollout's.
    """
    (n, k), machine = w.shape, machines.current()
    facts = matmul_facts(spec, (n, k), machine, order=order, x_dtype=jnp.dtype(x.dtype).name, rows=0)

    def call(x: Array, w: Packed, smoothing: Array | None) -> Array:
        rows = as_rows(x)
        if smoothing is not None:
            rows = rows.astype(FLOAT32) * smoothing
        first, row_scale, second = _operands(rows, w, spec, facts)
        y = kernels.packed_matmul(
            first,
            w.words,
            row_scale,
            w.scale,
            fmt=w.fmt,
            facts=dataclasses.replace(facts, m=rows.shape[0]),
            residual=second,
            out_dtype=out_dtype,
        )
        return settle(y.astype(FLOAT32), out_dtype).reshape(*x.shape[:-1], -1)

    if w.layout is not None:
        spread = w.layout.sharding(("batch",), x.shape).spec
        whole = jax.sharding.PartitionSpec()
        call = jax.shard_map(
            call, mesh=w.layout.mesh, in_specs=(spread, whole, whole), out_specs=spread, check_vma=False
        )
    return call(x, w, smoothing)


def _operands(
    x: Array, w: Packed, spec: MatmulSpec, facts: kernels.Facts
) -> tuple[Array, Array, Array | None]:
    """Operand [M, K'] bfloat16, row scales [M] float32, and the second operand or None, columns as w's."""
    one = jnp.ones(x.shape[0], FLOAT32)
    if spec.act is None:
        return kernels.order_k(x, w.fmt), one, None
    if w.blocks is not None:
        x = take_blocks(x, w.blocks)
    task = task_of(spec, w.length)
    q = kernels.quantize(x, task=task, facts=facts)
    second = q.residual if w.blocks is None else _second(x, q, w, task, facts)
    return q.operand, one if q.outer is None else q.outer, second


def _second(x: Array, q: kernels.Quantized, w: Packed, task: kernels.Task, facts: kernels.Facts) -> Array:
    """The quantized residual of the selected columns, which lie in front, under the first operand's scales.

    Its outer scale is that of the selected columns alone, so that they are cut out before they are quantized.
    """
    width = -(-w.selected // task.chunk) * task.chunk
    first = kernels.natural_k(q.operand[:, :width], w.fmt)[:, : w.selected].astype(FLOAT32)
    if q.outer is not None:
        first = first * q.outer[:, None]
    rest = x[:, : w.selected].astype(FLOAT32) - first
    again = kernels.quantize(rest, task=dataclasses.replace(task, width=width), facts=facts)
    if again.outer is None or q.outer is None:
        return again.operand
    ratio = again.outer / q.outer  # powers of two
    return (again.operand.astype(FLOAT32) * ratio[:, None]).astype(again.operand.dtype)
