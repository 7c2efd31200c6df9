"""The quantizer's kernel on a GPU: bit for bit first, then its speed beside a copy and XLA's own.

    python benchmarks/kernels_quantize.py [--budget 140] [--part check|time|all] [--output FILE]

Check: outputs of every task against the numpy emulation of the same program (which the tests hold to
`fp4rl_jax.quantize` on a CPU), every bfloat16 pattern among them, and against `fp4rl_jax.quantize` on
this GPU. One line each; exit code 1 if anything differs.

Time: whole operations inside one jit, `--repeats` runs, the median; a program calls the operation on
several inputs in turn, of `distinct` bytes in all (inputs and outputs; less than the cache at m = 1).
The copy is an elementwise exclusive or of bfloat16 patterns, the same way. `share` is the speed of the
bytes that must be moved (x read, operand and residual written) over that of the copy of the largest input.
Results are written after every line; nothing new starts after `--budget` seconds.
"""

import argparse
import dataclasses
import datetime
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernels_operands import Record

import fp4rl_jax
from fp4rl_jax import formats
from fp4rl_jax.quantizers import Quantizer
from pallas_kernels.quantize import cases, sm90, xla
from pallas_kernels.quantize.task import Task

Array = jax.Array
FORMATS = ("nvfp4", "mxfp4", "hif4")
DISTINCT = 130e6  # bytes between two uses of one input: twice the second-level cache
MOST_CALLS = 48


def options_of(fmt: str) -> formats.Format:
    """The project's format of an activation."""
    return formats.make("nvfp4", outer="row") if fmt == "nvfp4" else formats.make(fmt)


# ---- exact -------------------------------------------------------------------------------------
def patterns(array: Array) -> np.ndarray:
    """Bytes of an array, every nan the same."""
    a = np.asarray(array)
    if a.dtype == np.uint8:
        return a
    wide = a.astype(np.float32) if a.dtype != np.float32 else a
    raw = a.view(np.uint16 if a.dtype != np.float32 else np.uint32).astype(np.uint32)
    return np.where(np.isnan(wide), np.uint32(0xFFFFFFFF), raw)


def difference(got: Array | None, expected: Array | None) -> str:
    """How two outputs differ, or nothing."""
    if got is None or expected is None:
        return "" if got is expected else "one is missing"
    a, b = patterns(got), patterns(expected)
    if a.shape != b.shape:
        return f"shape {a.shape} for {b.shape}"
    wrong = np.argwhere(a != b)
    if not len(wrong):
        return ""
    first = [(tuple(map(int, at)), hex(int(a[tuple(at)])), hex(int(b[tuple(at)]))) for at in wrong[:3]]
    return f"{len(wrong)} of {a.size}: {first}"


def every_pattern() -> Array:
    """[64, 1024] bfloat16: every pattern once, near ones together."""
    return lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16).reshape(64, 1024)


def check_inputs() -> dict[str, Array]:
    """Inputs by name."""
    rng = np.random.default_rng(0)
    mixed = np.asarray(every_pattern()).reshape(-1)[rng.permutation(1 << 16)].reshape(64, 1024)
    finite = np.where(np.isfinite(mixed.astype(np.float32)), mixed, 0)
    named = {"every pattern": every_pattern(), "every pattern, mixed": jnp.asarray(finite)}
    shapes = [(37, 192, "bfloat16"), (37, 576, "float32"), (3, 4160, "float32"), (2, 28672, "bfloat16")]
    for m, k, dtype in shapes:
        named[f"{m} x {k} {dtype}"] = cases.Case(m=m, k=k, dtype=dtype).rows()
    return named


def check(record: Record) -> None:
    """Every task on every input against the emulation, then against the project's quantizer."""
    for fmt in FORMATS:
        for name, x in check_inputs().items():
            for task in cases.tasks(fmt) if name.startswith("every") else cases.tasks(fmt)[1::3]:
                if record.over():
                    return
                got = jax.jit(functools.partial(sm90.quantize, task=task))(x)
                expected = sm90.emulate(x, task=task)
                found = [(f, difference(getattr(got, f), getattr(expected, f))) for f in got._fields]
                wrong = {f: text for f, text in found if text}
                asked = f"{task.residual} {task.order} {'codes' * task.codes} {'bits' * task.compact}"
                record.add(check=fmt, x=name, task=asked, equal=not wrong, wrong=wrong)
    for fmt in FORMATS:
        x = cases.Case(m=37, k=576).rows()
        if record.over():
            return
        task = dataclasses.replace(cases.tasks(fmt)[1], compact=True)
        got = jax.jit(functools.partial(sm90.quantize, task=task))(x)
        q = fp4rl_jax.quantize(x, options_of(fmt))
        outer = None if q.outer_scale is None else q.outer_scale[:, 0]
        inner = jnp.pad(q.inner(jnp.bfloat16), ((0, 0), (0, got.operand.shape[1] - 576)))
        pairs = ((got.operand, inner), (got.packed, q.packed), (got.scales, q.scales), (got.outer, outer))
        wrong = [text for text in (difference(*pair) for pair in pairs) if text]
        record.add(check=fmt, x="37 x 576 bfloat16", task="fp4rl_jax.quantize", equal=not wrong, wrong=wrong)


# ---- speed -------------------------------------------------------------------------------------
def seconds(call: Callable[[Array], object], inputs: list[Array], repeats: int, guess: float) -> float:
    """Median seconds of one call, over runs of a program that calls it on every input, many times.

    Args:
        call: of one input. inputs: in turn. repeats: runs. guess: seconds of a call, for about 20 ms a run.
    """
    count = max(2, min(400, int(0.02 / (guess * len(inputs)))))
    inner = jax.jit(call)

    @jax.jit
    def run(inputs: list[Array]) -> object:
        def once(_: int, carry: tuple[list[Array], object]) -> tuple[list[Array], object]:
            held, _ = lax.optimization_barrier(carry)  # or the calls would be moved out of the loop
            return held, [inner(x) for x in held]

        first = [inner(x) for x in inputs]
        return lax.fori_loop(0, count, once, (inputs, first))[1]

    jax.block_until_ready(run(inputs))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(inputs))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / ((count + 1) * len(inputs))


def rows_of(m: int, k: int, dtype: str, moved: int) -> list[Array]:
    """Distinct inputs, of so many bytes together with what is written that the cache holds no two rounds."""
    number = max(2, min(MOST_CALLS, int(DISTINCT // moved) + 1))
    return [jax.random.normal(jax.random.key(i), (m, k), jnp.dtype(dtype)) for i in range(number)]


def copied(x: Array) -> Array:
    """A bfloat16 copy as one elementwise kernel."""
    flipped = lax.bitcast_convert_type(x, jnp.uint16) ^ jnp.uint16(1)
    return lax.bitcast_convert_type(flipped, jnp.bfloat16)


def bytes_of(m: int, k: int, dtype: str, task: Task) -> int:
    """Bytes that must be moved: x, operand, residual, codes and scales."""
    size = m * k
    total = size * jnp.dtype(dtype).itemsize + 2 * m * task.columns(k)
    total += 2 * m * task.columns(k) if task.residual != "none" else 0
    total += size // 2 if task.codes else 0
    total += size // 8 if task.compact else 0
    return total + (size // task.block * task.form.SCALE_WIDTH if task.wants_scales else 0)


def measure(record: Record, arguments: argparse.Namespace) -> None:
    """Times of the copy, of the kernel in several distributions over threads, and of XLA's fusions."""
    timed = functools.partial(seconds, repeats=arguments.repeats)
    moved = 4 * 4096 * 28672
    t = timed(copied, rows_of(4096, 28672, "bfloat16", moved), guess=moved / 4e12)
    best = moved / t
    record.add(copy="4096 x 28672", us=t * 1e6, tb_s=best / 1e12)
    plain = {fmt: Task(fmt=fmt, outer=cases.outer_of(fmt)) for fmt in FORMATS}
    for m in arguments.m:
        moved = 4 * m * 8192
        if record.over():
            return
        t = timed(copied, rows_of(m, 8192, "bfloat16", moved), guess=max(3e-6, moved / 4e12))
        record.add(copy=f"{m} x 8192", us=t * 1e6, tb_s=moved / t / 1e12)
        for task in plain.values():
            one(record, timed, best, task, m, 8192, arguments.turns)
    for m in arguments.m[:2]:
        for task in [t for fmt in FORMATS for t in cases.tasks(fmt)[1:]]:
            one(record, timed, best, task, m, 8192, (None,))
        for fmt in FORMATS:
            by_xla(record, timed, fmt, m, 8192)
    for k in arguments.k:
        for m in arguments.m[:2]:
            for task in plain.values():
                one(record, timed, best, task, m, k, (None,))
    for task in plain.values():
        one(record, timed, best, task, arguments.m[0], 8192, (None,), dtype="float32")


def one(record, timed, best: float, task: Task, m: int, k: int, turns, dtype: str = "bfloat16") -> None:
    """One shape of one task, in each distribution over threads."""
    moved = bytes_of(m, k, dtype, task)
    inputs = rows_of(m, k, dtype, moved)
    asked = " ".join(
        word
        for word in (task.residual, "codes" * task.codes, "bits" * task.compact)
        if word not in ("", "none")
    )
    seen = set()
    for count in turns:
        plan = sm90.plan_of(task, m=m, k=k, wide=dtype == "float32", turns=count)
        if record.over() or plan in seen:
            continue
        seen.add(plan)
        guess = max(4e-6, moved / 2.5e12)
        t = timed(functools.partial(sm90.quantize, task=task, turns=count), inputs, guess=guess)
        record.add(
            kernel=task.fmt,
            asked=asked or "operand",
            m=m,
            k=k,
            dtype=dtype,
            groups=plan.groups,
            turns=plan.turns,
            us=t * 1e6,
            tb_s=moved / t / 1e12,
            share=moved / t / best,
            distinct=moved * len(inputs),
        )


def by_xla(record: Record, timed, fmt: str, m: int, k: int) -> None:
    """The compiler's fusion of the kernel's arithmetic, and the project's own quantizer."""
    task = Task(fmt=fmt, outer=cases.outer_of(fmt))
    quantizer = Quantizer(options_of(fmt))
    inputs = rows_of(m, k, "bfloat16", 4 * m * k)[:3]
    calls = {
        "xla": functools.partial(xla.quantize, task=task),
        "fp4rl_jax": lambda x: quantizer.inner(x, dtype=jnp.bfloat16),
    }
    for name, call in calls.items():
        if record.over():
            return
        t = timed(call, inputs, guess=max(2e-5, 4 * m * k / 5e11))
        record.add(by=name, fmt=fmt, m=m, k=k, us=t * 1e6, tb_s=4 * m * k / t / 1e12)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=140)
    parser.add_argument("--part", choices=("check", "time", "all"), default="all")
    parser.add_argument("--m", type=int, nargs="+", default=[4096, 64, 1])
    parser.add_argument("--k", type=int, nargs="+", default=[28672, 4096])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=7)
    today = datetime.datetime.now(datetime.UTC).date()
    default = Path(__file__).parent / "results" / f"kernels_quantize_{today}.json"
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    record = Record(arguments.output, arguments.budget)
    if arguments.part != "time":
        check(record)
    if arguments.part != "check":
        measure(record, arguments)
    bad = sum(row.get("equal") is False for row in record.data["rows"])
    if bad:
        sys.exit(f"{bad} checks differ")


if __name__ == "__main__":
    main()
