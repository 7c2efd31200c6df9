"""The quantizer on Hopper: `program.run` in the registers of a GPU's lanes, or emulated."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Facts
from pallas_kernels.quantize import program
from pallas_kernels.quantize.emulated import Emulated, Words
from pallas_kernels.quantize.plan import Plan, Refs
from pallas_kernels.quantize.registers import Registers
from pallas_kernels.quantize.task import Quantized, Task

Array = jax.Array

#: Chunks that a quad takes by default.
TURNS = {"nvfp4": 2, "mxfp4": 1, "hif4": 1}
#: Elements of a row that a thread holds in registers, at most.
HELD = 64
#: Warpgroups of a block of threads, at most.
GROUPS = 8


def refuses(facts: Facts, task: Task) -> str | None:
    """Hopper; rows of whole blocks that one block of threads holds; outer scales that are powers of two."""
    if facts.platform != "gpu" or facts.capability != (9, 0):
        return f"needs a GPU of compute capability (9, 0), got {facts.platform} {facts.capability}"
    return refuses_shape(facts, task)


def refuses_shape(facts: Facts, task: Task) -> str | None:
    """`refuses` apart from the machine."""
    if facts.x_dtype not in ("bfloat16", "float32"):
        return f"needs bfloat16 or float32, got {facts.x_dtype}"
    if task.outer == "row" and task.outer_rounding != "pow2":
        return f"outer scales must be powers of two, got outer_rounding {task.outer_rounding!r}"
    if not facts.k or facts.k % task.block:
        return f"needs k to be a multiple of the block of {task.block}, got {facts.k}"
    longest = HELD * 128 * GROUPS
    if facts.k > longest:
        return f"holds rows of at most {longest} elements, got {facts.k}"
    if not facts.m:
        return "needs rows, got m=0"
    return None


def plan_of(task: Task, *, m: int, k: int, wide: bool, turns: int | None = None) -> Plan:
    """How many threads share a row, and how many chunks each of their quads takes.

    Args:
        task, m, k: of the call. wide: x is float32.
        turns: chunks a quad takes, at most (more only where a block of threads is full).
    """
    chunks = task.columns(k) // task.chunk
    turns = turns or TURNS[task.fmt]
    if chunks > 8 * turns:
        groups = min(GROUPS, -(-chunks // (32 * turns)))
        quads = 32 * groups
    else:
        groups, quads = 1, 1
        while quads < 8 and quads * turns < chunks:
            quads *= 2
    return Plan(task=task, m=m, k=k, wide=wide, groups=groups, quads=quads, turns=-(-chunks // quads))


def quantize(x: Array, *, task: Task, outer: Array | None = None, turns: int | None = None) -> Quantized:
    """`reference.quantize` on Hopper; `turns` as in `plan_of`."""
    plan = plan_of(task, m=x.shape[0], k=x.shape[1], wide=x.dtype == jnp.float32, turns=turns)
    shapes = _outputs(plan)
    inputs = {"x": x} if outer is None else {"x": x, "static": outer.reshape(1)}
    names = (*inputs, *shapes, "scratch")

    def body(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in names))
        def emit(ctx, *memory):
            del ctx
            program.run(Registers(), plan, Refs(**dict(zip(names, memory, strict=True))))

        emit(*refs)

    outputs = plgpu.kernel(
        body,
        out_type=tuple(shapes.values()),
        scratch_types=[plgpu.SMEM((2, 32), jnp.uint32)],
        grid=(plan.grid,),
        grid_names=("rows",),
        num_threads=plan.groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*inputs.values())
    return _finish(plan, dict(zip(shapes, outputs, strict=True)))


def emulate(x: Array, *, task: Task, outer: Array | None = None, turns: int | None = None) -> Quantized:
    """`quantize` on any machine: the same program, all threads at once, in numpy."""
    plan = plan_of(task, m=x.shape[0], k=x.shape[1], wide=x.dtype == jnp.float32, turns=turns)
    shapes = _outputs(plan)
    refs = Refs(x=_words(np.asarray(x)), operand=None)
    if outer is not None:
        refs.static = _words(np.asarray(outer, np.float32).reshape(1))
    arrays = {name: np.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
    for name, array in arrays.items():
        setattr(refs, name, _words(array))
    with np.errstate(all="ignore"):
        program.run(Emulated(plan.grid, 128 * plan.groups), plan, refs)
    return _finish(plan, {name: jnp.asarray(array) for name, array in arrays.items()})


def _words(x: np.ndarray) -> Words:
    """The array's memory as words."""
    return Words(x.reshape(-1).view(np.uint32))


def _outputs(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that the kernel writes, in whole chunks."""
    task, m, columns = plan.task, plan.m, plan.columns
    operand = jax.ShapeDtypeStruct((m, columns), jnp.bfloat16)
    outer = jax.ShapeDtypeStruct((m,), jnp.float32)
    shapes = {"operand": operand}
    if task.outer == "row":
        shapes["outer"] = outer
    if task.residual != "none":
        shapes["residual"] = operand
        if task.form.OUTER and not task.folded:
            shapes["residual_outer"] = outer
    if task.codes:
        shapes["packed"] = jax.ShapeDtypeStruct((m, columns // 2), jnp.uint8)
    if task.wants_scales:
        shape = (m, columns // task.block * task.form.SCALE_WIDTH)
        shapes["scales"] = jax.ShapeDtypeStruct(shape, jnp.uint8)
    if task.compact:
        shapes["bits"] = jax.ShapeDtypeStruct((m, columns // 8), jnp.uint8)
    return shapes


def _finish(plan: Plan, outputs: dict[str, Array]) -> Quantized:
    """Cuts what was written in whole chunks to the row's own length."""
    task, k = plan.task, plan.k
    lengths = {
        "packed": k // 2,
        "scales": k // task.block * task.form.SCALE_WIDTH,
        "bits": k // 8,
    }
    cut = {
        name: out[:, : lengths[name]] if out.shape[-1] != lengths.get(name, out.shape[-1]) else out
        for name, out in outputs.items()
    }
    return Quantized(**cut)
