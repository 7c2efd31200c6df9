"""`fp4rl formats [FILE]`: what each number format stores, and its error on a tensor.

fp4rl formats                                             every format, on weights-like data
fp4rl formats model.safetensors --tensor blocks.0.w       on a tensor of one's own
fp4rl formats w.npy --format nvfp4 --set outer=row --set four_over_six=mse
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from fp4rl_jax import dequantize, formats, quantize
from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.cli import _flags
from fp4rl_jax.formats import Format
from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.safetensors_file import DTYPES, SafetensorsFile

SUMMARY = "number formats: grid, bits, scales, and their error on a tensor, as a table and a picture"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One format on one tensor.

    Attributes:
        fmt: the format.
        bits: bits a value, everything stored counted.
        relative_error: mean((x^ - x)^2) / mean(x^2).
        underflow, saturation: shares of values, non-zero ones that became zero and ones that took
            the largest code.
        ratio: [N] float32, x over its scales: what is compared with the grid.
    """

    fmt: Format
    bits: float
    relative_error: float
    underflow: float
    saturation: float
    ratio: np.ndarray


def main(argv: Sequence[str]) -> int:
    """Prints the table and draws the picture; exit code 2 for a mistake in what was asked."""
    values = flags.FlagValues()
    flags.DEFINE_multi_string("format", [], "a format; repeatable; all by default", flag_values=values)
    flags.DEFINE_multi_string(
        "set", [], "option=value of every format named by --format; repeatable", flag_values=values
    )
    flags.DEFINE_string("tensor", None, "which tensor of a safetensors file", flag_values=values)
    flags.DEFINE_integer("axis", -1, "the quantized axis", flag_values=values)
    flags.DEFINE_string(
        "picture", "runs/formats.png", "where to draw; empty for no picture", flag_values=values
    )
    words = _flags.parse(values, argv, name="formats", summary=SUMMARY, words="[FILE]")
    try:
        if len(words) > 1:
            raise ValueError(f"takes one file, got {len(words)}: {' '.join(words)}")
        chosen = [
            _format(name, values["set"].value or ()) for name in values["format"].value or formats.names()
        ]
        x, title = _tensor(Path(words[0]), values["tensor"].value) if words else _weights_like()
        reports = [_report(fmt, x, int(values["axis"].value or 0)) for fmt in chosen]
    except (ValueError, OSError) as error:
        print(f"fp4rl formats: {error}", file=sys.stderr)
        return 2
    print(_table(reports, title))
    if values["picture"].value:
        from fp4rl_jax.cli import _formats_picture  # draws with matplotlib, which the table does not need

        path = Path(values["picture"].value)
        _formats_picture.draw(reports, title, path)
        print(f"\npicture: {path}")
    return 0


def _format(name: str, settings: Sequence[str]) -> Format:
    """The format with its options set, each value being the choice that prints like the word."""
    base = formats.make(name)
    options = {}
    for setting in settings:
        option, equals, word = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes option=value, got {setting!r}")
        fields = {field.name: field.metadata.get("choices", ()) for field in dataclasses.fields(base)}
        by_word = {str(choice): choice for choice in fields.get(option, ())}
        options[option] = by_word.get(word, word)
    return formats.make(base, **options)


def _tensor(path: Path, name: str | None) -> tuple[np.ndarray, str]:
    """float32 values of a .npy file or of one tensor of a safetensors file, and a title."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if path.suffix == ".npy":
        x, title = np.load(path), path.name
    elif path.suffix == ".safetensors":
        x, title = _from_safetensors(path, name)
    else:
        raise ValueError(f"{path} is neither .npy nor .safetensors")
    if x.ndim == 0 or x.size == 0 or x.dtype.kind not in "fV" and x.dtype.name != "bfloat16":
        raise ValueError(f"{title} has shape {x.shape} and dtype {x.dtype}: expected numbers along an axis")
    return np.asarray(x, np.float32), title


def _from_safetensors(path: Path, name: str | None) -> tuple[np.ndarray, str]:
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    name = name or max(
        file.tensors, key=lambda n: (len(file.tensors[n].shape) > 1, np.prod(file.tensors[n].shape))
    )
    if name not in file.tensors:
        raise unknown_name(f"tensor of {path.name}", name, file.tensors)
    info = file.tensors[name]
    x = np.empty(info.shape, DTYPES[info.dtype])
    file.read_into(name, x)
    return x, f"{path.name}: {name}"


def _weights_like() -> tuple[np.ndarray, str]:
    """A [1024, 2048] matrix shaped like a trained one: heavy tails, channels of unequal size."""
    rng = np.random.default_rng(0)
    rows = rng.lognormal(sigma=0.25, size=(1024, 1))
    columns = rng.lognormal(sigma=0.4, size=(1, 2048))
    x = 0.02 * rng.standard_t(6, size=(1024, 2048)) * rows * columns
    return x.astype(np.float32), "weights-like data (Student's t, unequal channels)"


def _report(fmt: Format, x: np.ndarray, axis: int) -> Report:
    given = {}
    if fmt.span == "static":
        given["outer_scale"] = fmt.outer_from_amax(formats.bits.block_amax(jnp.asarray(x).reshape(-1)))
    q = quantize(jnp.asarray(x), fmt, axis=axis, **given)
    value = np.asarray(dequantize(q), np.float64)
    element = np.asarray(jax.jit(fmt.element)(q.codes()), np.float64)
    ones = jnp.ones((*q.packed.shape[:-1], q.length + q.padding), jnp.uint8)
    unit = (
        np.asarray(dequantize(dataclasses.replace(q, packed=fmt.pack(ones))), np.float64) / magnitudes(fmt)[1]
    )
    ratio = (x / np.where(unit > 0, unit, np.nan)).reshape(-1)
    fine = np.isfinite(value)
    error = np.sum((value - x)[fine] ** 2) / max(np.sum(np.square(x, dtype=np.float64)[fine]), 1e-300)
    return Report(
        fmt=fmt,
        bits=8 * q.nbytes / q.size,
        relative_error=float(error),
        underflow=float(((value == 0) & (x != 0)).mean()),
        saturation=float((np.abs(element) == fmt.qmax).mean()),
        ratio=ratio[np.isfinite(ratio)].astype(np.float32),
    )


def magnitudes(fmt: Format) -> list[float]:
    """The non-negative values of an element, in order."""
    values = np.asarray(fmt.element(jnp.arange(1 << (fmt.code_bits - 1), dtype=jnp.uint8)))
    return [float(v) for v in values if np.isfinite(v)]


def describe(fmt: Format) -> str:
    """The name, and the options that are not the default's."""
    base = formats.make(fmt.name)
    changed = [
        f"{field.name}={getattr(fmt, field.name)}"
        for field in dataclasses.fields(fmt)
        if getattr(fmt, field.name) != getattr(base, field.name)
    ]
    return " ".join([fmt.name, *changed])


def _grid(fmt: Format) -> str:
    points = magnitudes(fmt)
    shown = [f"{v:g}" for v in points]
    if len(shown) > 16:
        shown = [*shown[:3], "...", *shown[-3:]]
    return f"{' '.join(shown)}  ({len(points)} magnitudes)"


def _table(reports: Sequence[Report], title: str) -> str:
    width = max(len(describe(report.fmt)) for report in reports)
    head = f"{'format':<{width}}  {'bits/value':>10}  {'rel. error':>10}  {'to zero':>8}  {'at limit':>8}"
    lines = [f"on {title}", "", head, "-" * len(head)]
    for r in reports:
        lines.append(
            f"{describe(r.fmt):<{width}}  {r.bits:>10.4g}  {r.relative_error:>10.2e}"
            f"  {r.underflow:>8.2%}  {r.saturation:>8.2%}"
        )
    lines += ["", "bits/value counts everything stored; rel. error is mean((x^ - x)^2) / mean(x^2)", ""]
    for r in reports:
        lines += [describe(r.fmt), f"  grid    {_grid(r.fmt)}", f"  scales  {'; '.join(r.fmt.levels)}"]
    return "\n".join(lines)
