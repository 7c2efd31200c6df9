"""Quantization of activations along rows, to the operands that the matmuls of packed weights take.

`quantize` validates, chooses and calls; `reference.py` is its meaning, `task.Task` says what may be
asked; `IMPLS` is the written order. All implementations agree bit for bit.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Choice, Facts, Impl, choose
from pallas_kernels.matmul import CPU, H200
from pallas_kernels.quantize import reference, sm90, xla
from pallas_kernels.quantize.task import Quantized, Task

Array = jax.Array


__all__ = ["Quantized", "Task", "impls", "quantize", "select"]


def impls(task: Task) -> tuple[Impl, ...]:
    """The written order for a task; the reference is last and never refuses."""

    def with_task(refuses: Callable[[Facts, Task], str | None]) -> Callable[[Facts], str | None]:
        return lambda facts: refuses(facts, task)

    return (
        Impl(name="sm90", run=sm90.quantize, refuses=with_task(sm90.refuses), verified_on=(H200,)),
        Impl(name="xla", run=xla.quantize, refuses=with_task(xla.refuses), verified_on=(CPU,)),
        Impl(name="reference", run=reference.quantize, refuses=lambda _: None, verified_on=(CPU,)),
    )


def select(task: Task, facts: Facts, impl: str = "auto") -> Choice:
    """The implementation that `quantize` takes for these facts; see `dispatch.choose`."""
    return choose(impls(task), facts, impl)


def quantize(
    x: Array, *, task: Task, facts: Facts, outer: Array | None = None, impl: str = "auto"
) -> Quantized:
    """Quantizes every row of x.

    Args:
        x: [m, k] float32 or bfloat16, k a multiple of the format's block. A non-finite value poisons
            its block: products nan, codes 0, scale byte 0x7F or 255.
        task: the format and the outputs asked for.
        facts: of this call; m, k and x_dtype are filled in.
        outer: [] float32, a power of two of at least 2^-126, with task.outer "static" only.
        impl: "auto" or a name of `impls`.

    Returns:
        Quantized. Exact: the bytes of `fp4rl_jax.quantize` and the values of its `inner`.

    Raises:
        ValueError: x is no matrix, k is no multiple of the block or above task.width, or outer is
            missing or not asked for.
        TypeError: x is neither float32 nor bfloat16.
        UnsupportedError: the named implementation refuses.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"quantize takes float32 or bfloat16, got {x.dtype}")
    if x.ndim != 2 or x.shape[1] % task.block or not x.shape[1]:
        raise ValueError(f"quantize takes [m, k] with k a multiple of {task.block}, got {x.shape}")
    if task.width and task.width < x.shape[1]:
        raise ValueError(f"width {task.width} of the operand is less than k = {x.shape[1]}")
    if (outer is None) == (task.outer == "static"):
        raise ValueError(f"outer= is for outer='static'; task has {task.outer!r}, got {outer}")
    facts = dataclasses.replace(facts, m=x.shape[0], k=x.shape[1], x_dtype=jnp.dtype(x.dtype).name)
    return select(task, facts, impl).impl.run(x, task=task, outer=outer)
