"""Every format in every mode on an accelerator: the same bytes as on the CPU, however it is compiled.

    python benchmarks/gpu_formats.py OUTPUT.json [--quick] [--part 1/3]

A GPU compiler folds a narrow cast and its inverse away under jit, so that a quantize-dequantize
written with casts changes nothing, without a word. This script shows that (its record has the error
of such a round trip) and proves that the formats of this project are immune: codes, scale bytes and outer
scales under eager, jit, scan, vmap and grad equal those of the CPU, for float32 and bfloat16, on
ordinary data, 30 binades, ties, subnormals, zeros, infinities and nans. `--quick` takes one option
at a time instead of all combinations; `--part 2/3` every third of the programs from the second, so that three
processes share the work. Exit code 1 if anything differs.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp4rl_jax
from fp4rl_jax import Guided, Stochastic, formats
from fp4rl_jax.formats import Format
from fp4rl_jax.quantizers import Quantizer, compact

SHAPE = (4, 32, 256)  # kinds of data, rows, columns
CHUNK = 12  # modes compiled into one program
GOLDEN = Path(__file__).parent.parent / "tests" / "formats" / "golden.npz"


def inputs() -> np.ndarray:
    """[4, 32, 256] float32 that bfloat16 holds too: ordinary, wide, awkward, poisoned."""
    rng = np.random.default_rng(0)
    ordinary = rng.standard_normal(SHAPE[1:])
    wide = rng.standard_normal(SHAPE[1:]) * 2.0 ** rng.integers(-15, 15, SHAPE[1:])
    ties = rng.choice([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0], SHAPE[1:])
    ties[8:16] *= 2.0**-126  # subnormals among them
    ties[16:20] = 0
    poisoned = rng.standard_normal(SHAPE[1:])
    poisoned[3, 5], poisoned[20, 100], poisoned[21, 7] = np.inf, -np.inf, np.nan
    stack = np.stack([ordinary, wide, ties, poisoned]).astype(np.float32)
    return np.asarray(jnp.asarray(stack, jnp.bfloat16).astype(jnp.float32))


def given(fmt: Format) -> dict[str, Any]:
    """The outer scale that a format with outer="static" is to be given; nothing for the others."""
    return {"outer_scale": jnp.float32(2.0**-6)} if fmt.span == "static" else {}


def bytes_and_values(fmt: Format, x: jax.Array) -> dict[str, object]:
    """Packed codes, scale bytes and outer scale of an array, and its fake-quantized values."""
    quantizer = Quantizer(fmt)
    return {
        "bytes": quantizer.quantize(x, **given(fmt)),
        "values": quantizer.fake_quantize(x, **given(fmt)),
    }


def roundings(fmt: Format, x: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    """Codes of the other roundings, and the bfloat16 operand of an emulated matmul."""
    bits = lax.bitcast_convert_type(x, jnp.int32) ^ (3 << 16)  # another bfloat16 within 2 %, no arithmetic
    near = Quantizer(fmt).quantize(lax.bitcast_convert_type(bits, jnp.float32), **given(fmt))
    return {
        "stochastic": Quantizer(fmt, Stochastic()).quantize(x, key=key, **given(fmt)).packed,
        "guided": Quantizer(fmt, Guided()).quantize(x, hint=near).packed,
        "compact": Quantizer(fmt, Guided()).quantize(x, hint=compact(near)).packed,
        "operand": Quantizer(fmt).inner(x, dtype=jnp.bfloat16, **given(fmt))[0],
    }


def value_and_gradient(fmt: Format, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The fake-quantized values as seen inside a differentiated function, and the clipped gradient."""

    def loss(x):
        y = Quantizer(fmt, ste="clipped").fake_quantize(x, **given(fmt))
        return jnp.sum(y.astype(jnp.float32)), y

    gradient, value = jax.grad(loss, has_aux=True)(x)
    return value, gradient


def differing(ours: object, theirs: object) -> int:
    """How many array elements differ in their bits; all nans are alike, and so are all numbers that a
    CPU's arithmetic, unlike a GPU's, flushes to zero."""
    total = 0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (np.asarray(v) for v in (a, b))
        if a.dtype.kind == "u":
            total += int((a != b).sum())
            continue
        a, b = (np.where(np.abs(v.astype(np.float64)) < 2.0**-126, 0, v.astype(np.float64)) for v in (a, b))
        total += int(((a != b) & ~(np.isnan(a) & np.isnan(b))).sum())
    return total


def chunks(modes: Sequence[Format]) -> Iterator[tuple[Format, ...]]:
    """The modes, `CHUNK` at a time: what one compiled program runs."""
    for start in range(0, len(modes), CHUNK):
        yield tuple(modes[start : start + CHUNK])


def over(modes: Sequence[Format], function: Callable) -> Callable:
    """`function(fmt, *arguments)` of every mode, as one function of the arguments that gives a list."""
    return lambda *arguments: [function(fmt, *arguments) for fmt in modes]


def check_chunk(modes: Sequence[Format], x: np.ndarray) -> dict[str, int]:
    """Differences from the CPU, by way of compiling, over a chunk of modes and all kinds of data."""
    plain, graded = over(modes, bytes_and_values), over(modes, value_and_gradient)
    with jax.default_device(jax.devices("cpu")[0]):
        kinds = [jnp.asarray(kind) for kind in x]
        known = [jax.jit(plain)(kind) for kind in kinds]
        known_graded = [jax.jit(graded)(kind) for kind in kinds]
    stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(v) for v in leaves]), *known)
    here = jnp.asarray(x)
    jitted = jax.jit(plain)
    found = [jitted(kind) for kind in here]
    narrow = [jitted(kind.astype(jnp.bfloat16)) for kind in here]
    scanned = jax.jit(lambda x: lax.scan(lambda _, kind: (None, plain(kind)), None, x)[1])(here)
    mapped = jax.jit(jax.vmap(plain))(here)
    return {
        "jit, bytes": differing([_bytes(f) for f in found], [_bytes(k) for k in known]),
        "jit, values": differing([_values(f) for f in found], [_values(k) for k in known]),
        "scan": differing(scanned, stacked),
        "vmap": differing(mapped, stacked),
        "grad": differing([jax.jit(graded)(kind) for kind in here], known_graded),
        "eager, bytes": differing([_eager(modes, kind) for kind in here], [_bytes(k) for k in known]),
        "bfloat16 against float32, bytes": differing([_bytes(n) for n in narrow], [_bytes(f) for f in found]),
    }


def check_roundings(fmt: Format, x: np.ndarray) -> int:
    """Differences from the CPU of stochastic and guided codes and of operands, under jit."""
    key = jax.random.key(0)
    function = jax.jit(partial(roundings, fmt))
    with jax.default_device(jax.devices("cpu")[0]):
        known = [function(jnp.asarray(kind), jax.random.key(0)) for kind in x]
    return differing([function(jnp.asarray(kind), key) for kind in x], known)


def _bytes(results: Sequence[dict[str, object]]) -> list[object]:
    return [result["bytes"] for result in results]


def _values(results: Sequence[dict[str, object]]) -> list[object]:
    return [result["values"] for result in results]


def _eager(modes: Sequence[Format], x: jax.Array) -> Sequence[object]:
    with jax.disable_jit():
        return [Quantizer(fmt).quantize(x, **given(fmt)) for fmt in modes]


def relative_mse(x: jax.Array, y: jax.Array) -> float:
    exact, error = np.asarray(x, np.float64), np.asarray(y, np.float64) - np.asarray(x, np.float64)
    return float(np.mean(error**2) / np.mean(exact**2))


def contrast() -> dict[str, dict[str, float]]:
    """Relative error of a round trip under jit: written with casts, and through `fake_quantize`."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((256, 1024)), jnp.float32)

    def with_casts(x):
        blocks = x.reshape(256, 64, 16)
        scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 6.0
        scale = scale.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        q = jnp.clip(blocks / scale, -6, 6).astype(jnp.float4_e2m1fn).astype(jnp.float32)
        return (q * scale).reshape(x.shape)

    found = {
        "written with casts": {
            "eager": relative_mse(x, with_casts(x)),
            "jit": relative_mse(x, jax.jit(with_casts)(x)),
        }
    }
    for name in formats.names():
        found[name] = _round_trips(x, partial(fp4rl_jax.fake_quantize, fmt=name))
    return found


def _round_trips(x: jax.Array, function: Callable) -> dict[str, float]:
    with jax.disable_jit():
        eager = function(x)
    half_square = lambda x: 0.5 * jnp.sum(function(x) ** 2)  # noqa: E731 (its gradient is the value)
    return {
        "eager": relative_mse(x, eager),
        "jit": relative_mse(x, jax.jit(function)(x)),
        "scan": relative_mse(x, lax.scan(lambda _, row: (None, function(row)), None, x[None])[1][0]),
        "grad": relative_mse(x, jax.jit(jax.grad(half_square))(x)),
        "vmap": relative_mse(x, jax.jit(jax.vmap(function))(x[None])[0]),
    }


def golden() -> dict[str, int]:
    """Bytes on this device that differ from those of independent implementations (finite cases)."""
    data = dict(np.load(GOLDEN))
    cases = [k.split("|")[1] for k in data if k.startswith("input|")]
    counts = {"nvfp4 TE-ref bytes": 0, "nvfp4 TE-ref codes": 0, "mxfp4 torchao": 0, "hif4 HiF4-numpy": 0}
    for case in cases:
        x = data[f"input|{case}"]
        if not np.isfinite(x).all():
            continue
        q = fp4rl_jax.quantize(jnp.asarray(x), "nvfp4", outer_rounding="fp32")
        scales = data[f"nvfp4/TE-ref|{case}|bscale"]
        live = np.repeat(scales != 0, 16, axis=-1)
        counts["nvfp4 TE-ref bytes"] += int((np.asarray(q.scale_bytes()) != scales).sum())
        counts["nvfp4 TE-ref codes"] += _codes_differ(
            q, np.where(live, data[f"nvfp4/TE-ref|{case}|codes"], 0)
        )
        for rule in ("floor", "even", "rceil", "ceil"):
            q = fp4rl_jax.quantize(jnp.asarray(x), "mxfp4", scale_rule=rule)
            theirs = f"mxfp4-{rule}/torchao|{case}|"
            counts["mxfp4 torchao"] += int((np.asarray(q.scale_bytes()) != data[theirs + "bscale"]).sum())
            counts["mxfp4 torchao"] += _codes_differ(q, data[theirs + "codes"])
        value = np.asarray(fp4rl_jax.quantize(jnp.asarray(x), "hif4").dequantize())
        counts["hif4 HiF4-numpy"] += int((value != data[f"hif4/HiF4-numpy|{case}|deq"]).sum())
    return counts


def _codes_differ(q: fp4rl_jax.QTensor, theirs: np.ndarray) -> int:
    ours = np.asarray(q.codes())
    return int((np.where(ours == 8, 0, ours) != np.where(theirs == 8, 0, theirs)).sum())


def ordered_modes(name: str, quick: bool) -> tuple[Format, ...]:
    """One option at a time first, so that a run cut short has covered each; then all combinations."""
    first = formats.variations(name)
    return first if quick else (*first, *(m for m in formats.modes(name) if m not in first))


def verdict(record: dict) -> str:
    """ "equal", or what differs and which format's round trip was folded away."""
    differences = [*record["differences from the CPU"].values()]
    differences.append(record["differences from independent implementations"])
    wrong = sum(sum(counts.values()) for counts in differences)
    folded = [
        (name, way)
        for name, ways in record["relative squared error of a round trip"].items()
        for way, error in ways.items()
        if name in formats.names() and error != ways["eager"]
    ]
    return "equal" if not wrong and not folded else f"{wrong} differences, folded: {folded}"


def main() -> int:
    """Runs all checks, writes the record after every chunk; exit code 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="the JSON record")
    parser.add_argument("--quick", action="store_true", help="one option at a time, not all combinations")
    parser.add_argument("--part", default="1/1", help="which share of the programs, e.g. 2/3")
    arguments = parser.parse_args()
    part, parts = (int(x) for x in arguments.part.split("/"))
    device = jax.devices()[0]
    record: dict = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": f"{device.platform}: {device.device_kind}",
        "values a mode": int(np.prod(SHAPE)),
        "relative squared error of a round trip": contrast(),
        "differences from independent implementations": golden(),
        "modes": {},
        "differences from the CPU": {},
    }
    print(json.dumps(record, indent=1), flush=True)
    x = inputs()
    for name in formats.names():
        total = {"other roundings, jit": check_roundings(formats.make(name), x)}
        record["differences from the CPU"][name] = total
        done = record["modes"][name] = []
        for chunk in list(chunks(ordered_modes(name, arguments.quick)))[part - 1 :: parts]:
            start = time.monotonic()
            for way, count in check_chunk(chunk, x).items():
                total[way] = total.get(way, 0) + count
            done += [str(fmt) for fmt in chunk]
            record["verdict"] = verdict(record)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{name}: {len(done)} modes {total} {time.monotonic() - start:.0f} s", flush=True)
    print(record["verdict"])
    return 0 if record["verdict"] == "equal" else 1


if __name__ == "__main__":
    sys.exit(main())
