"""The only door to `pallas_kernels`: facts from the machine and the operands, then the call."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels.decode_attention
import pallas_kernels.formats
import pallas_kernels.grouped_matmul
import pallas_kernels.matmul
import pallas_kernels.packed_matmul
import pallas_kernels.quantize
from fp4rl_jax.arrays import Array
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.parallel import Layout
from pallas_kernels.dispatch import Choice, Facts, UnsupportedError
from pallas_kernels.formats import TILE_N, natural_k, order_k, pack, packable, padded_k
from pallas_kernels.packed_matmul.cases import SHAPES as PACKED_SHAPES
from pallas_kernels.quantize import Quantized, Task

__all__ = [
    "DECODE_STEP",
    "PACKED_FORMATS",
    "PACKED_SHAPES",
    "TILE_N",
    "Choice",
    "Facts",
    "Quantized",
    "Task",
    "UnsupportedError",
    "decode_attention",
    "facts_of",
    "grouped_matmul",
    "grouped_outer",
    "hardware_dtypes",
    "matmul",
    "natural_k",
    "order_k",
    "pack",
    "packable",
    "packed_matmul",
    "padded_k",
    "quantize",
    "select_decode_attention",
    "select_grouped",
    "select_matmul",
    "select_packed",
    "select_quantize",
]

#: Names of the formats that weights can be packed in.
PACKED_FORMATS = tuple(pallas_kernels.formats.FORMATS)

#: Columns of a cache that is read in place are a multiple of this.
DECODE_STEP = pallas_kernels.decode_attention.STEP


def facts_of(machine: Machine, **call: Any) -> Facts:
    """Facts of one call on `machine`; `call` holds fields of `Facts` such as m, n, k, x_dtype."""
    return Facts(
        platform=machine.platform,
        capability=machine.capability,
        narrow=machine.narrow,
        **call,
    )


def select_matmul(facts: Facts) -> Choice:
    """The matmul implementation that these facts lead to, with the reasons."""
    return pallas_kernels.matmul.select(facts)


def select_grouped(facts: Facts) -> Choice:
    """The grouped-matmul implementation that these facts lead to, with the reasons."""
    return pallas_kernels.grouped_matmul.select(facts)


def select_packed(facts: Facts) -> Choice:
    """The packed-matmul implementation that these facts lead to, with the reasons."""
    return pallas_kernels.packed_matmul.select(facts)


def select_quantize(task: Task, facts: Facts) -> Choice:
    """The quantizer of activations that these facts lead to, with the reasons."""
    return pallas_kernels.quantize.select(task, facts)


def select_decode_attention(facts: Facts) -> Choice:
    """The implementation of `decode_attention` that these facts lead to, with the reasons."""
    return pallas_kernels.decode_attention.select(facts)


@functools.cache
def hardware_dtypes(machine: Machine) -> tuple[str, ...]:
    """Quantized element dtypes that some verified matmul of this machine multiplies natively."""
    fp8 = pallas_kernels.matmul.FP8
    choice = select_matmul(facts_of(machine, m=16, n=16, k=16, x_dtype=fp8, w_dtype=fp8))
    return (fp8,) if choice.impl.native else ()


def matmul(x: Array, w: Array, *, dims: tuple[int, int] = (1, 1), order: str = "free") -> Array:
    """Contracts two matrices with float32 accumulation on the current machine.

    Args:
        x, w: two axes each, one dtype.
        dims: the contracted axis of x and of w; (1, 1) is x [m, k] times w [n, k].
        order: "free", or "fixed" for rows that do not depend on how many there are.

    Returns:
        float32: x's other axis, then w's other axis.
    """
    facts = facts_of(
        machines.current(),
        m=x.shape[1 - dims[0]],
        n=w.shape[1 - dims[1]],
        k=x.shape[dims[0]],
        x_dtype=jnp.dtype(x.dtype).name,
        w_dtype=jnp.dtype(w.dtype).name,
        order=order,
    )
    return pallas_kernels.matmul.matmul(x, w, facts=facts, dims=dims)


def grouped_matmul(x: Array, w: Array, group_sizes: Array, *, axis: int = 2, order: str = "free") -> Array:
    """Rows [M, k], sorted by group, times w [E, n, k] (axis 2) or [E, k, n] (axis 1): [M, n] float32."""
    facts = facts_of(
        machines.current(),
        m=x.shape[0],
        n=w.shape[3 - axis],
        k=x.shape[1],
        x_dtype=jnp.dtype(x.dtype).name,
        w_dtype=jnp.dtype(w.dtype).name,
        order=order,
    )
    return pallas_kernels.grouped_matmul.grouped_matmul(x, w, group_sizes, facts=facts, axis=axis)


def grouped_outer(a: Array, b: Array, group_sizes: Array) -> Array:
    """Outer products summed by group: [M, n], [M, k] -> [E, n, k] float32."""
    facts = facts_of(
        machines.current(),
        m=a.shape[1],
        n=b.shape[1],
        k=a.shape[0],
        x_dtype=jnp.dtype(a.dtype).name,
        w_dtype=jnp.dtype(b.dtype).name,
    )
    return pallas_kernels.grouped_matmul.grouped_outer(a, b, group_sizes, facts=facts)


def packed_matmul(
    x: Array,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    facts: Facts,
    residual: Array | None = None,
    out_dtype: jnp.dtype,
) -> Array:
    """`pallas_kernels.packed_matmul` of operands in its order of columns: [m, n] out_dtype."""
    return pallas_kernels.packed_matmul.packed_matmul(
        x, packed, row_scale, scale, fmt=fmt, facts=facts, residual=residual, out_dtype=out_dtype
    )


def quantize(x: Array, *, task: Task, facts: Facts) -> Quantized:
    """`pallas_kernels.quantize` of rows [m, k]; shape and dtype of the facts are x's."""
    return pallas_kernels.quantize.quantize(x, task=task, facts=facts)


def decode_attention(
    q: Array,
    cache: tuple[Array, Array],
    prompt: tuple[Array, Array],
    *,
    layer: Array,
    lengths: Array,
    starts: Array,
    scale: float,
    facts: Facts,
    layout: Layout | None,
    impl: str = "auto",
) -> Array:
    """`pallas_kernels.decode_attention` of one new token a row; on a mesh, every device its rows and heads.

    Args:
        q: [B, H, C]. cache: keys and values [L, B, K, S, C]. prompt: [L, P, K, T, C].
        layer: [] int32. lengths: [B] int32, columns seen of the cache. starts: [P] int32, the first column
            seen of the prompt. scale: of the scores.
        facts: of the whole call.
        layout: prompts and KV heads divide over its devices; None is one device.
        impl: "auto" or a name.
    """

    def call(q: Array, cache: Any, prompt: Any, layer: Array, lengths: Array, starts: Array) -> Array:
        return pallas_kernels.decode_attention.decode_attention(
            q, cache, prompt, layer=layer, lengths=lengths, starts=starts, scale=scale, facts=facts, impl=impl
        )

    if layout is not None:
        of = layout.rules.spec
        rows, stack = of(("batch",)), of((None, "batch", "kv_heads"))
        call = jax.shard_map(
            call,
            mesh=layout.mesh,
            in_specs=(of(("batch", "heads")), (stack, stack), (stack, stack), of(()), rows, rows),
            out_specs=of(("batch", "heads")),
            check_vma=False,  # axes that share out neither rows nor heads compute the same
        )
    return call(q, cache, prompt, layer, lengths, starts)
