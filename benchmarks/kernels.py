"""Exactness and speed of the packed FP4 matmul on a GPU, against bfloat16 and FP8 dots.

    python benchmarks/kernels.py check                         # exact first: one line a check
    python benchmarks/kernels.py time --cases all --m 1 8 16   # medians of the configs of the tuning table
    python benchmarks/kernels.py tune --cases all --m 8 64     # sweeps configs, prints the winners

Every part stops starting new work after `--budget` seconds and writes what it has after each case.
A time is of a whole operation (sums of parts, scales, transpose and bfloat16 output included): the
slope between two numbers of calls inside one jit, each on other weights, more than 120 MB in all; the
median of `--repeats`. A config that the compiler or the GPU refuses is recorded with its error and
the run goes on (JaxRuntimeError, ValueError and NotImplementedError; anything else stops it).
"""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import itertools
import json
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.packed_matmul import sm90
from pallas_kernels.packed_matmul.config import Config, impossible, padded_m

#: n x k: Llama-70B-like up and down, two squares, and Qwen3-8B's fused linears.
SHAPES = {
    "mlp_up": (28672, 8192),
    "mlp_down": (8192, 28672),
    "sq8k": (8192, 8192),
    "sq4k": (4096, 4096),
    "q3_qkv": (6144, 4096),
    "q3_gateup": (24576, 4096),
    "q3_down": (4096, 12288),
}
DISTINCT_BYTES = 130e6  # of weights between two uses of one: twice the second-level cache
REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)


class Record:
    """The results, written after every entry."""

    def __init__(self, path: Path, budget: float):
        self.path, self.end = path, time.monotonic() + budget
        self.data = dict(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            rows=[],
        )

    def add(self, **row) -> None:
        """Prints a row and writes the file."""
        self.data["rows"].append(row)
        print(
            " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
            flush=True,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=0) + "\n")

    def over(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.end


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


@contextlib.contextmanager
def alone(path: Path):
    """Holds a file's lock: several processes compile at once and one at a time uses the GPU."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- operands ---------------------------------------------------------------------------------
def random_weight(n: int, k: int, fmt: str, seed: int) -> tuple[jax.Array, jax.Array]:
    """Random codes and finite scale bytes, on the device."""
    f = formats.FORMATS[fmt]
    keys = jax.random.split(jax.random.key(seed), 2)
    codes = jax.random.bits(keys[0], (n, k), jnp.uint8) & 15
    scales = jax.random.bits(keys[1], (n, -(-k // f.BLOCK) * f.SCALE_WIDTH), jnp.uint8)
    limit = {"nvfp4": 0x7F, "mxfp4": 120, "hif4": 0xFF}[fmt]
    return codes, scales % limit + (64 if fmt == "mxfp4" else 0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def packed_weight(n: int, k: int, fmt: str, seed) -> tuple[jax.Array, jax.Array]:
    """A random packed weight and its unit."""
    return formats.pack(*random_weight(n, k, fmt, seed), fmt)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_stream(n: int, k: int, fmt: str, seed) -> jax.Array:
    """A packed weight of random codes and random scales in the middle of their range, for timing."""
    f = formats.FORMATS[fmt]
    shape = (n // 64, k // f.BLOCK_K, f.CODE_ROWS + f.SCALE_ROWS, 128)
    words = jax.random.bits(jax.random.key(seed), shape, jnp.uint32)
    return words.at[:, :, f.CODE_ROWS :].set((words[:, :, f.CODE_ROWS :] & 0x7F7F7F7F) | 0x40404040)


def dense(codes: np.ndarray, scales: np.ndarray, fmt: str) -> np.ndarray:
    """float64 weights from codes and scale bytes, by the written meaning of each format (numpy only)."""
    code = codes.astype(np.int64)
    sign, magnitude = np.where(code & 8, -1.0, 1.0), code & 7
    byte = scales.astype(np.int64)
    if fmt == "hif4":
        block = byte.reshape(len(byte), -1, 4)
        group = np.arange(16)
        fine = ((block[..., 1:2] >> (group // 2)) & 1) + (
            ((block[..., 2:3] | (block[..., 3:4] << 8)) >> group) & 1
        )
        one = 2.0 ** ((block[..., :1] >> 2) - 48) * (1 + (block[..., :1] & 3) / 4)
        scale = np.repeat((one * 2.0**fine).reshape(len(byte), -1), 4, axis=1)
        return sign * magnitude / 4 * scale[:, : codes.shape[1]]
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[magnitude]
    if fmt == "mxfp4":
        scale = 2.0 ** (byte - 127)
    else:
        exponent, fraction = byte >> 3, byte & 7
        scale = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + fraction / 8), 2.0**-6 * fraction / 8)
    return sign * value * np.repeat(scale, 16 if fmt == "nvfp4" else 32, axis=1)[:, : codes.shape[1]]


# ---- exactness --------------------------------------------------------------------------------
def check_configs() -> list[Config]:
    """One config for every path of the kernel."""
    return [
        Config(groups=1, tile_m=8),
        Config(groups=2, tile_m=16, stages=3),
        Config(groups=4, tile_m=8, splits=2),
        Config(groups=2, tile_m=16, splits=4),
        Config(groups=2, tile_m=32, share=2),
        Config(groups=2, tile_m=64, splits=2, share=2),
        Config(groups=2, tile_m=64, segments=2),
        Config(groups=2, tile_m=128, stages=3, early=False),
        Config(groups=4, tile_m=128, stages=2),
        Config(groups=2, tile_m=256, tile_k=128, stages=2),
    ]


def _operands(fmt: str, n: int, k: int):
    codes, scales = random_weight(n, k, fmt, 7)
    packed, unit = jax.jit(formats.pack, static_argnums=2)(codes, scales, fmt)
    w = dense(np.asarray(codes), np.asarray(scales), fmt)
    return packed, unit, w


def check(record: Record, args) -> None:
    """One-hot rows bit for bit, random rows against float64, the residual, NaN, and the fixed order."""
    n, k = 512, 2048
    for fmt in formats.FORMATS if args.fmt == "all" else [args.fmt]:
        packed, unit, w = _operands(fmt, n, k)
        for config in check_configs():
            if record.over():
                return
            row = dict(part="check", fmt=fmt, config=_short(config))
            print("check", fmt, row["config"], flush=True)  # a kernel that hangs is named
            try:
                record.add(**row, **check_one(packed, unit, w, fmt, config))
            except REFUSALS as error:
                record.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")
    if args.fmt in ("all", "nvfp4"):
        check_order(record)


def check_one(packed, unit, w, fmt: str, config: Config) -> dict:
    """Exactness figures of one config; every `_ok` must be True."""
    n, k = w.shape
    m = max(config.tile_m, 64)
    m = padded_m(m, config)
    ones, scale = jnp.ones(m, jnp.float32), unit.reshape(1)
    reason = impossible(config, fmt, m=m, n=n, k=k, out_bytes=4)
    if reason:
        return dict(skipped=reason)
    run = jax.jit(functools.partial(sm90.matmul, fmt=fmt, config=config, out_dtype=jnp.float32))
    order = jax.jit(functools.partial(formats.order_k, fmt=fmt))
    hot_ok = True
    for low in range(0, k, m):
        x = np.zeros((m, k), np.float32)
        columns = np.arange(low, min(low + m, k))
        x[np.arange(len(columns)), columns] = 1
        out = np.asarray(run(order(jnp.asarray(x, jnp.bfloat16)), packed, ones, scale), np.float64)
        hot_ok &= bool(np.array_equal(out[: len(columns)], w[:, columns].T))
    rng = np.random.default_rng(1)
    x, r = (jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16) for _ in range(2))
    row = jnp.asarray(2.0 ** rng.integers(-3, 4, m), jnp.float32)
    x64, r64, row64 = (np.asarray(a, np.float64) for a in (x, r, row))
    found = dict(hot_ok=hot_ok)
    exact, size = (x64 @ w.T) * row64[:, None], (abs(x64) @ abs(w).T) * row64[:, None]
    out = np.asarray(run(order(x), packed, row, scale), np.float64)
    found |= dict(random_units=float((abs(out - exact) / (size * 2.0**-24)).max()), k_units=2 * k + 2)
    half = order(r)[:, : k // 2]
    if impossible(config, fmt, m=m, n=n, k=k, residual_k=k // 2, out_bytes=4) is None:
        both = jax.jit(functools.partial(sm90.matmul, fmt=fmt, config=config, out_dtype=jnp.float32))
        out = np.asarray(both(order(x), packed, row, scale, residual=half), np.float64)
        w_ordered = np.asarray(order(jnp.asarray(w, jnp.float32)), np.float64)[:, : k // 2]
        second, size2 = (
            np.asarray(half, np.float64) @ w_ordered.T,
            abs(np.asarray(half, np.float64)) @ abs(w_ordered).T,
        )
        error = abs(out - exact - second * row64[:, None]) / ((size + size2 * row64[:, None]) * 2.0**-24)
        found |= dict(residual_units=float(error.max()))
    poisoned = order(x.at[3, 5].set(jnp.nan))
    out = np.asarray(run(poisoned, packed, row, scale))
    return found | dict(nan_ok=bool(np.isnan(out[3]).all() and not np.isnan(np.delete(out, 3, 0)).any()))


def check_order(record: Record) -> None:
    """Rows of one input, for many m and tilings under one tree of sums, bit for bit."""
    n, k, parts = 512, 4096, 4
    packed, unit = packed_weight(n, k, "nvfp4", 3)
    rng = np.random.default_rng(2)
    x = formats.order_k(jnp.asarray(rng.standard_normal((4096, k)), jnp.bfloat16), "nvfp4")
    expected = None
    for m, config in (
        (8, Config(groups=2, tile_m=8, splits=parts)),
        (8, Config(groups=4, tile_m=8, splits=parts)),
        (16, Config(groups=1, tile_m=16, splits=parts)),
        (24, Config(groups=2, tile_m=24, splits=parts)),
        (64, Config(groups=2, tile_m=64, splits=parts)),
        (64, Config(groups=2, tile_m=64, segments=parts, tile_k=128)),
        (128, Config(groups=2, tile_m=128, segments=parts, tile_k=128)),
        (4096, Config(groups=2, tile_m=128, segments=parts, tile_k=128, share=2)),
        (4096, Config(groups=1, tile_m=128, segments=parts, tile_k=128)),
    ):
        if record.over():
            return
        row = dict(part="order", m=m, config=_short(config))
        try:
            run = functools.partial(sm90.matmul, fmt="nvfp4", config=config, out_dtype=jnp.float32)
            out = np.asarray(jax.jit(run)(x[:m], packed, jnp.ones(m, jnp.float32), unit.reshape(1)))
        except REFUSALS as error:
            record.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")
            continue
        expected = out[:8] if expected is None else expected
        record.add(**row, same_bits=bool(np.array_equal(out[:8], expected)))


# ---- timing -----------------------------------------------------------------------------------
def compiled(call, xs, weights):
    """call(x, w) on every weight, at least eight times, in one jit."""
    one = jax.jit(call)
    rounds = -(-8 // len(weights))

    def run(xs, weights):
        return [one(xs[i], w) for i in range(rounds) for w in weights]

    return jax.jit(run).lower(xs, weights).compile(), rounds * len(weights)


def seconds_a_call(program, xs, weights, repeats: int) -> float:
    """Median seconds of one call: the slope between two and six programs sent without waiting."""
    run, calls = program
    jax.block_until_ready(run(xs, weights))
    slopes = []
    for _ in range(repeats):
        spent = []
        for count in (2, 6):
            start = time.perf_counter()
            outs = [run(xs, weights) for _ in range(count)]
            jax.block_until_ready(outs[-1])
            spent.append(time.perf_counter() - start)
            del outs
        slopes.append((spent[1] - spent[0]) / (4 * calls))
    return statistics.median(slopes)


def num_weights(n: int, k: int, bits: float) -> int:
    """Weights that make up `DISTINCT_BYTES`, at least two."""
    return max(2, -(-int(DISTINCT_BYTES * 8) // int(n * k * bits)))


class Case:
    """Operands of one n x k x m, made once for all configs."""

    def __init__(self, n: int, k: int, m: int, fmt: str):
        self.n, self.k, self.m, self.fmt = n, k, m, fmt
        count = num_weights(n, k, 4.5)
        self.packed = [random_stream(n, k, fmt, i) for i in range(count)]
        self.rows = -(-m // 8) * 8
        keys = jax.random.split(jax.random.key(1), 4)
        self.xs = [jax.random.normal(key, (self.rows, k), jnp.bfloat16) for key in keys]

    def bf16(self, repeats: int) -> float:
        """Seconds of XLA's bfloat16 dot."""
        count = num_weights(self.n, self.k, 16)
        ws = [jax.random.normal(jax.random.key(i), (self.n, self.k), jnp.bfloat16) for i in range(count)]
        xs = [x[: self.m] for x in self.xs]
        dot = functools.partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())))
        return seconds_a_call(compiled(dot, xs, ws), xs, ws, repeats)

    def inputs(self, config: Config) -> list[jax.Array]:
        """The activations, padded to whole tiles."""
        rows = padded_m(self.rows, config)
        return [jnp.pad(x, ((0, rows - self.rows), (0, 0))) for x in self.xs]

    def program(self, config: Config, residual_k: int = 0):
        """The compiled calls of one config."""
        rows = padded_m(self.rows, config)
        row_scale, scale = jnp.ones(rows, jnp.float32), jnp.ones(1, jnp.float32)
        run = functools.partial(sm90.matmul, fmt=self.fmt, config=config)

        def call(x, w):
            residual = x[:, :residual_k] if residual_k else None
            return run(x, w, row_scale, scale, residual=residual)

        return compiled(call, self.inputs(config), self.packed)


def torch_seconds(n: int, k: int, m: int, repeats: int) -> dict:
    """Seconds of torch's bfloat16 and tensorwise FP8 linear, in one CUDA graph; empty without torch."""
    try:
        import torch
    except ImportError:
        return {}
    count = num_weights(n, k, 8)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    found = dict(torch_bf16_us=_graph_us(lambda w: torch.mm(x, w.t()), ws, repeats))
    one = torch.ones((), device="cuda")
    rows = -(-m // 16) * 16
    x8 = torch.zeros(rows, k, device="cuda").to(torch.float8_e4m3fn)
    w8 = [w.to(torch.float8_e4m3fn) for w in ws]
    del ws
    run = lambda w: torch._scaled_mm(x8, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    return found | dict(torch_fp8_us=_graph_us(run, w8, repeats))


def _graph_us(call, weights, repeats: int) -> float:
    import torch

    for w in weights[:2]:
        call(w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            call(w)
    samples = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(samples[1:])


# ---- sweeps -----------------------------------------------------------------------------------
def candidates(n: int, k: int, m: int, fmt: str) -> list[Config]:
    """Configs worth trying, the likeliest first."""
    rows = -(-m // 8) * 8
    found = []
    if m <= 32:
        tiles = n // 64
        for per_sm, (tile_k, stages) in itertools.product(
            (4, 2, 3, 6, 8, 1), ((256, 4), (256, 6), (512, 3), (256, 3), (512, 2), (512, 4))
        ):
            for splits, groups in itertools.product((1, 2, 4, 8), (2, 4, 1)):
                if (per_sm - 0.5) * 132 < tiles * splits <= (per_sm + 0.5) * 132:
                    found.append(
                        Config(groups=groups, tile_m=rows, tile_k=tile_k, stages=stages, splits=splits)
                    )
    elif m <= 128:
        grid = itertools.product((4, 2), (rows, rows // 2), (256, 128), (3, 4, 2), (1, 2, 4), (1, 2))
        for groups, tile_m, tile_k, stages, splits, share in grid:
            found.append(
                Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=stages, splits=splits, share=share)
            )
        blocks = lambda c: n // 64 // c.groups * c.splits * (rows // c.tile_m)  # noqa: E731
        found = [c for c in found if c.tile_m % 8 == 0 and 90 <= blocks(c) <= 1100]
        found.sort(key=lambda c: (c.tile_m != rows, abs(blocks(c) - 132) // 40))
    else:
        grid = itertools.product(
            (
                (2, 128, 128, 4),
                (2, 256, 128, 3),
                (4, 128, 128, 4),
                (2, 256, 128, 2),
                (4, 128, 128, 3),
                (2, 192, 128, 3),
            ),
            (2, 1),
            (8, 4, 16),
        )
        for (groups, tile_m, tile_k, stages), share, raster in grid:
            found.append(
                Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=stages, share=share, raster=raster)
            )
    return [c for c in found if impossible(c, fmt, m=padded_m(rows, c), n=n, k=k) is None]


def tune(record: Record, args) -> None:
    """Times candidates of every case, round robin under the budget, and prints the winners."""
    names = list(SHAPES) if args.cases == ["all"] else args.cases
    pairs = [(name, m) for m in args.m for name in names]
    for done, (name, m) in enumerate(pairs):
        n, k = SHAPES[name]
        if record.over():
            return
        share_end = time.monotonic() + (record.end - time.monotonic()) / (len(pairs) - done)
        best = None
        with args.alone():
            case = Case(n, k, m, args.fmt)
            if args.baseline:
                record.add(part="bf16", case=name, m=m, us=case.bf16(args.repeats) * 1e6)
        for config in candidates(n, k, m, args.fmt)[: args.most]:
            if time.monotonic() > share_end:
                break
            config = dataclasses.replace(config, early=False) if args.late else config
            row = dict(part="tune", case=name, n=n, k=k, m=m, fmt=args.fmt, config=_short(config))
            print("tune", name, m, row["config"], flush=True)
            try:
                program = case.program(config)
                with args.alone():
                    us = seconds_a_call(program, case.inputs(config), case.packed, args.repeats) * 1e6
            except REFUSALS as error:
                record.add(**row, error=f"{type(error).__name__}: {str(error)[:200]}")
                continue
            record.add(**row, us=us, tbps=n * k * 4.5 / 8 / us / 1e6, tflops=2 * n * k * m / us / 1e6)
            best = min(best or (us, config), (us, config), key=lambda pair: pair[0])
        if best:
            record.add(part="winner", case=name, m=m, fmt=args.fmt, us=best[0], config=_short(best[1]))
        del case


def _short(config: Config) -> str:
    default = Config()
    changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return ",".join(f"{k}={v}" for k, v in changed.items() if v != getattr(default, k) or k == "groups")


def peers(record: Record, args) -> None:
    """torch's bfloat16 and FP8 and XLA's bfloat16, case by case."""
    names = list(SHAPES) if args.cases == ["all"] else args.cases
    for m, name in itertools.product(args.m, names):
        if record.over():
            return
        n, k = SHAPES[name]
        with args.alone():
            record.add(part="peer", case=name, n=n, k=k, m=m, **torch_seconds(n, k, m, args.repeats))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["check", "tune", "peers"])
    parser.add_argument("--cases", nargs="+", default=["all"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--m", nargs="+", type=int, default=[8])
    parser.add_argument("--fmt", default="nvfp4", choices=["all", *formats.FORMATS])
    parser.add_argument("--budget", type=float, default=240, help="seconds after which nothing new is begun")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--most", type=int, default=1000, help="configs tried a case")
    parser.add_argument(
        "--lock", type=Path, help="a file that processes which share the GPU lock to time alone"
    )
    parser.add_argument(
        "--late", action="store_true", help="do not load weights before the kernel in front ends"
    )
    parser.add_argument("--baseline", action="store_true", help="time XLA's bfloat16 dot too")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.alone = functools.partial(alone, args.lock) if args.lock else contextlib.nullcontext
    today = datetime.date.today().isoformat()
    out = args.out or Path(__file__).parent / "results" / f"kernels_{args.part}_{today}.json"
    record = Record(out, args.budget)
    {"check": check, "tune": tune, "peers": peers}[args.part](record, args)


if __name__ == "__main__":
    main()
