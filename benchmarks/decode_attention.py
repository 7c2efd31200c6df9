"""Attention of one decode step, the cache read in place and through slices: seconds, bytes a second, errors.

    python benchmarks/decode_attention.py --json OUTPUT.json

Keys and values of random numbers, stacked over eight layers shaped as SmolLM2-135M's and Qwen3-1.7B's; a
program walks `--steps` times over them, as decode steps do. Times are medians of `--repeats` programs for one
layer; bytes are those of the keys and values that have to be read, a prompt's once for its eight rows.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import provenance

from pallas_kernels.decode_attention import cases, sm90, xla

RUNS: dict[str, Callable[..., jax.Array]] = {
    "sm90": sm90.decode_attention,
    "xla": xla.decode_attention,
}


def seconds(run: Callable[..., jax.Array], case: cases.Case, *, steps: int, repeats: int) -> float:
    """Of one layer's attention, in a program that walks `steps` times over all layers."""
    (q, cache, prompt), numbers = case.operands()
    call = functools.partial(run, scale=case.head_dim**-0.5)

    @jax.jit
    def program(q: jax.Array, cache: Any, prompt: Any, numbers: dict[str, jax.Array]) -> jax.Array:
        def one(index: jax.Array, q: jax.Array) -> jax.Array:
            layer = jax.lax.rem(index, case.layers)
            return call(q, cache, prompt, **(numbers | {"layer": layer}))

        return jax.lax.fori_loop(0, steps * case.layers, one, q)

    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(q, cache, prompt, numbers))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:]) / (steps * case.layers)


def error(run: Callable[..., jax.Array], case: cases.Case) -> float:
    """Largest error against the reference over the bound that `cases.expected` derives; at most 1."""
    operands, numbers = case.operands()
    scale = case.head_dim**-0.5
    got = np.asarray(jax.jit(functools.partial(run, scale=scale))(*operands, **numbers), np.float64)
    want, limit = cases.expected(case, scale=scale)
    return float((np.abs(got - want) / np.maximum(limit, 1e-30)).max())


def main() -> None:
    """Checks and times every case, prints as it goes, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the cases' names")
    parser.add_argument("--runs", nargs="+", choices=sorted(RUNS), default=sorted(RUNS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        **provenance.facts(),
        "errors": {},
        "seconds": {},
    }
    for number, case in enumerate(cases.SMALL):
        for name in options.runs:
            record["errors"][f"{name} small {number}"] = error(RUNS[name], case)
    if "sm90" in options.runs:
        for number, case in enumerate(cases.SMALL):
            run = functools.partial(sm90.decode_attention, splits=2)
            record["errors"][f"sm90 small {number} in 2 splits"] = error(run, case)
    print(json.dumps(record["errors"]), file=sys.stderr, flush=True)
    for title, case in cases.DECODE.items():
        if not any(part in title for part in options.cases):
            continue
        found: dict[str, Any] = {"bytes": case.read_bytes}
        for name in options.runs:
            spent = seconds(RUNS[name], case, steps=options.steps, repeats=options.repeats)
            found[name] = {
                "us": round(spent * 1e6, 2),
                "tb_per_second": round(case.read_bytes / spent / 1e12, 3),
            }
        record["seconds"][title] = found
        print(json.dumps({title: found}), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
