"""Time to quantize a 4096 x 4096 bfloat16 matrix, against copying it and taking its largest magnitude.

    python benchmarks/quantize.py [OUTPUT.json]

The yardstick reads and writes what any quantizer must read: a plain copy and an abs-max of the same
matrix, compiled together. Goal: every 4-bit format with its default options within 4 times of it on
two cores. Runs are interleaved, the best of `REPEATS` counts, and the load of the machine is
recorded, since anything else that runs spoils the figures.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import formats
from fp4rl_jax.quantizers import Quantizer

REPEATS = 15
GOAL = 4.0
CASES = {
    "nvfp4": {},
    "nvfp4 outer=row": {"outer": "row"},
    "nvfp4 outer_rounding=fp32": {"outer_rounding": "fp32"},
    "nvfp4 block_shape=16x16": {"block_shape": "16x16"},
    "nvfp4 four_over_six=mse": {"four_over_six": "mse"},
    "mxfp4": {},
    "hif4": {},
    "fp8_e4m3": {},
}


@jax.jit
def copy_and_absmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.copy(x), jnp.max(jnp.abs(x))


def seconds(function: Callable, x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(x))
    return time.perf_counter() - start


def measure() -> dict[str, float]:
    """Best time in milliseconds of the yardstick, of each case, and of row-scaled NVFP4 operands."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4096, 4096), np.float32), jnp.bfloat16)
    functions: dict[str, Callable] = {"copy and abs-max": copy_and_absmax}
    for name, options in CASES.items():
        functions[name] = Quantizer(formats.make(name.split()[0], **options)).quantize
    row = Quantizer(formats.make("nvfp4", outer="row"))
    functions["nvfp4 outer=row, operand in bfloat16"] = partial(row.inner, dtype=jnp.bfloat16)
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        seconds(function, x)  # compiles
    for _ in range(REPEATS):
        for name, function in functions.items():
            best[name] = min(best[name], seconds(function, x))
    return {name: 1e3 * value for name, value in best.items()}


def main() -> int:
    milliseconds = measure()
    unit = milliseconds["copy and abs-max"]
    ratios = {name: value / unit for name, value in milliseconds.items()}
    for name, value in milliseconds.items():
        print(f"{name:<40} {value:8.1f} ms  {ratios[name]:5.2f} x")
    defaults = {name: ratios[name] for name in ("nvfp4", "mxfp4", "hif4")}
    held = max(defaults.values()) <= GOAL
    print(f"defaults within {GOAL} x: {'yes' if held else 'no'}")
    record = {
        "jax": jax.__version__,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "milliseconds": milliseconds,
        "ratio": ratios,
        "goal_held": held,
    }
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
