"""Seconds of one call on a GPU: programs of many calls, each on weights of its own.

How a figure is made, and what it guards against:

- Every call of a program has its own weight and its own activations. Calls that share an operand are
  merged by the compiler (four bfloat16 products with one weight became one with four times the rows).
- A program is about `PROGRAM_SECONDS` of work, so that sending it costs less than running it, and reads
  more than `DISTINCT_BYTES` of weights, so that none waits in the second-level cache.
- A sample is the slope between one and four programs sent without waiting; the figure is the median of
  the samples and `spread` half their interquartile range over it.
- A figure below what `floor_us` allows by the fastest read and the peak rate is marked, never hidden.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
from kernels_operands import random_stream

from pallas_kernels.packed_matmul import sm90
from pallas_kernels.packed_matmul.config import Config, padded_m

DISTINCT_BYTES = 130e6
PROGRAM_SECONDS = 7e-4
MOST_CALLS = 96
#: Dense bfloat16 products of an H100 or H200, per second, at its highest clock.
PEAK_FLOPS = 989e12


def calls_of(bytes_a_call: float, flops: float) -> int:
    """Calls of one program."""
    seconds = max(bytes_a_call / 3.5e12, flops / 6e14) + 4e-6
    return int(min(MOST_CALLS, max(4, PROGRAM_SECONDS / seconds, DISTINCT_BYTES / bytes_a_call)) + 1)


def compiled(call, x, w, count: int):
    """A program of `count` calls on the shapes x and w, compiled; it overwrites its third argument.

    Results that lie where those of the run before lay keep the recorded graph as it is: with other
    addresses every call of it is recorded anew, which takes longer than a small call.
    """
    one = jax.jit(call)

    def run(xs, ws, outs):
        del outs
        return [one(x, w) for x, w in zip(xs, ws, strict=True)]

    out = jax.eval_shape(call, x, w)
    program = jax.jit(run, donate_argnums=2, keep_unused=True)
    return program.lower([x] * count, [w] * count, [out] * count).compile(), out


def sample_us(program, xs, ws, repeats: int) -> dict:
    """`us` of one call, the median of the samples, and their `spread`; `program` is of `compiled`."""
    run, out = program
    outs = [jnp.zeros(out.shape, out.dtype) for _ in ws]
    for _ in range(3):  # the second run records the graph
        outs = jax.block_until_ready(run(xs, ws, outs))
    samples = []
    for _ in range(repeats):
        spent = []
        for programs in (1, 4):
            start = time.perf_counter()
            for _ in range(programs):
                outs = run(xs, ws, outs)
            jax.block_until_ready(outs)
            spent.append(time.perf_counter() - start)
        samples.append((spent[1] - spent[0]) / (3 * len(ws)) * 1e6)
    return summary(samples)


def summary(samples: list[float]) -> dict:
    """Median and spread of microseconds."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    middle = statistics.median(ordered)
    return dict(us=middle, spread=(ordered[-1 - quarter] - ordered[quarter]) / 2 / middle)


def floor_us(read_bytes: float, flops: float, read_tbps: float) -> float:
    """The least time that the fastest read of the run and the peak rate allow."""
    return max(read_bytes / read_tbps / 1e6, flops / PEAK_FLOPS * 1e6)


@functools.partial(jax.jit, static_argnums=(0, 1))
def normal(rows: int, columns: int, seed) -> jax.Array:
    """Standard normal values, bfloat16."""
    return jax.random.normal(jax.random.key(seed), (rows, columns), jnp.bfloat16)


@functools.cache
def normal_program(rows: int, columns: int):
    """`normal` compiled: seed -> array."""
    return normal.lower(rows, columns, 0).compile()


class Operands:
    """Arrays of one n x k and format, made when first asked for."""

    def __init__(self, n: int, k: int, fmt: str):
        self.n, self.k, self.fmt = n, k, fmt
        self.make = random_stream.lower(n, k, fmt, 0).compile()
        self.shape = jax.eval_shape(functools.partial(random_stream, n, k, fmt), 0)
        self.packed: list[jax.Array] = []

    def weights(self, count: int) -> list[jax.Array]:
        """Packed weights, all different."""
        self.packed += [self.make(i) for i in range(len(self.packed), count)]
        return self.packed[:count]


class Packed:
    """The compiled program of one config, without its operands."""

    def __init__(self, operands: Operands, m: int, config: Config, residual_k: int = 0):
        self.operands, self.rows = operands, padded_m(-(-m // 8) * 8, config)
        n, k, rows = operands.n, operands.k, self.rows
        self.count = calls_of(n * k * 4.5 / 8, 2 * n * k * m)

        def call(x, w):
            x, residual = x if residual_k else (x, None)
            scales = jnp.ones(rows, jnp.float32), jnp.ones(1, jnp.float32)
            return sm90.matmul(x, w, *scales, fmt=operands.fmt, config=config, residual=residual)

        x = jax.ShapeDtypeStruct((rows, k), jnp.bfloat16)
        self.residual_k = residual_k
        self.tokens = normal_program(rows, k)
        if residual_k:
            self.second = normal_program(rows, residual_k)
            x = (x, jax.ShapeDtypeStruct((rows, residual_k), jnp.bfloat16))
        self.program = compiled(call, x, operands.shape, self.count)

    def sample(self, repeats: int) -> dict:
        """`sample_us` of the program."""
        xs: list = [self.tokens(i) for i in range(self.count)]
        if self.residual_k:
            second = self.second(self.count)
            xs = [(x, second) for x in xs]
        return sample_us(self.program, xs, self.operands.weights(self.count), repeats)


class XlaBf16:
    """The compiled program of XLA's bfloat16 dot of [m, k] and [n, k]."""

    def __init__(self, n: int, k: int, m: int):
        self.count = calls_of(n * k * 2.0, 2 * n * k * m)
        self.tokens, self.weight = normal_program(m, k), normal_program(n, k)
        x, w = (jax.ShapeDtypeStruct((rows, k), jnp.bfloat16) for rows in (m, n))
        dot = functools.partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
        self.program = compiled(dot, x, w, self.count)

    def sample(self, repeats: int) -> dict:
        """`sample_us` of the program."""
        xs, ws = ([make(i) for i in range(self.count)] for make in (self.tokens, self.weight))
        return sample_us(self.program, xs, ws, repeats)


class FastestRead:
    """Programs that read a gigabyte in three ways."""

    SIDE = 16384

    def __init__(self):
        shape = jax.ShapeDtypeStruct((self.SIDE, self.SIDE), jnp.uint32)
        ways = (
            lambda w: w.max(axis=1),
            lambda w: w.max(axis=0),
            lambda w: w.reshape(-1, 1024).max(axis=1),
        )
        self.programs = [jax.jit(way).lower(shape).compile() for way in ways]
        self.make = jax.jit(lambda: jnp.ones((self.SIDE, self.SIDE), jnp.uint32)).lower().compile()

    def tbps(self, repeats: int) -> float:
        """TB/s of the fastest way, by the slope between four and sixteen reads."""
        words = self.make()
        best = 0.0
        for run in self.programs:
            jax.block_until_ready(run(words))
            samples = []
            for _ in range(repeats):
                spent = []
                for count in (4, 16):
                    start = time.perf_counter()
                    jax.block_until_ready([run(words) for _ in range(count)])
                    spent.append(time.perf_counter() - start)
                samples.append((spent[1] - spent[0]) / 12)
            best = max(best, words.nbytes / statistics.median(samples) / 1e12)
        return best


# ---- torch ------------------------------------------------------------------------------------
def torch_us(n: int, k: int, m: int, repeats: int) -> dict:
    """Microseconds of torch's bfloat16 and tensorwise FP8 linear in one CUDA graph each."""
    import torch  # pyright: ignore[reportMissingImports]

    found = {}
    for name, size in (("bf16", 2), ("fp8", 1)):
        count = calls_of(n * k * size, 2 * n * k * m / (1 if size == 2 else 2))
        rows = m if size == 2 else -(-m // 16) * 16
        xs = torch.randn(count, rows, k, device="cuda", dtype=torch.bfloat16)
        ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(min(count, 8))]
        ws = (
            [ws[i % len(ws)].clone() for i in range(count)]
            if size == 2
            else [ws[i % len(ws)].to(torch.float8_e4m3fn) for i in range(count)]
        )
        if size == 1:
            xs = xs.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")

        def call(x, w, size=size, one=one):
            if size == 2:
                return torch.mm(x, w.t())
            return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        got = _graph_us(call, list(zip(xs, ws, strict=True)), repeats)
        found |= {f"torch_{name}_us": got["us"], f"torch_{name}_spread": got["spread"]}
        del xs, ws
    return found


def _graph_us(call, pairs, repeats: int) -> dict:
    import torch  # pyright: ignore[reportMissingImports]

    for pair in pairs[:2]:
        call(*pair)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pair in pairs:
            call(*pair)
    samples = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(pairs))
    return summary(samples[1:])
