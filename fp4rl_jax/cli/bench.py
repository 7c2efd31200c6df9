"""`fp4rl bench kernels`: what multiplies packed FP4 weights on this machine, and its speed on a GPU.

fp4rl bench kernels                                     seven shapes, 8, 64 and 1024 rows
fp4rl bench kernels --case sq8k --rows 16 --format mxfp4

The timing is that of `benchmarks/kernels.py time --xla`, of the repository; without a GPU nothing is timed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.cli import _flags
from fp4rl_jax.ops.kernels import PACKED_FORMATS, PACKED_SHAPES, facts_of, padded_k, select_packed
from fp4rl_jax.ops.machine import Machine, current

SUMMARY = "what multiplies packed FP4 weights here, and how fast on a GPU"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


def main(argv: Sequence[str]) -> int:
    """Prints which implementation runs, then on a GPU the times; exit code 2 for a mistake in the words."""
    values = flags.FlagValues()
    names = list(PACKED_SHAPES)
    flags.DEFINE_multi_enum("case", names, names, "a shape; repeatable", flag_values=values)
    flags.DEFINE_multi_integer(
        "rows", [8, 64, 1024], "rows of activations; repeatable", 1, flag_values=values
    )
    flags.DEFINE_enum("format", "nvfp4", list(PACKED_FORMATS), "of the weights", flag_values=values)
    what = _flags.parse(values, argv, name="bench", summary=f"{SUMMARY}\n\n{__doc__}", words="kernels")
    if what != ["kernels"]:
        wrong = unknown_name("benchmark", what[0], ["kernels"]) if what else "usage: fp4rl bench kernels"
        print(f"fp4rl bench: {wrong}", file=sys.stderr)
        return 2
    cases, rows = (_flags.get(values, name, list) for name in ("case", "rows"))
    fmt = _flags.get(values, "format", str)
    machine = current()
    print("\n".join(chosen(machine, cases, rows, fmt)), flush=True)
    if machine.platform != "gpu":
        print(f"\nNothing is timed: this is a {machine.platform}; docs/KERNELS.md has figures of a GPU.")
        return 0
    if not SCRIPT.exists():
        print(f"fp4rl bench: timing needs the repository: no {SCRIPT}", file=sys.stderr)
        return 1
    words = [sys.executable, str(SCRIPT), "time", "--xla", "--fmt", fmt]
    words += ["--cases", *cases, "--m", *map(str, rows)]
    paths = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(words, check=False, env=environment).returncode


def chosen(machine: Machine, cases: Sequence[str], rows: Sequence[int], fmt: str) -> list[str]:
    """One line a case and number of rows: the implementation that `auto` takes, and why."""
    lines = [f"packed {fmt} weights, free order: what runs on this {machine.platform}", ""]
    for case in cases:
        n, k = PACKED_SHAPES[case]
        for m in rows:
            facts = facts_of(machine, m=m, n=n, k=padded_k(k, fmt), w_dtype=fmt)
            choice = select_packed(facts)
            lines.append(f"{case:10} {n:6} x {k:<6} m={m:<5} {choice.impl.name:10} {choice.reason}")
    return lines
