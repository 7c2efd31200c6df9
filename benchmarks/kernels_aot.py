"""Compiles the Blackwell matmul for sm_100a on a machine without a GPU, and counts what is in its PTX.

    python -m venv VENV && VENV/bin/pip install "jax[cuda13]==0.11.2" ml_dtypes
    PYTHONPATH=. JAX_PLATFORMS=cpu VENV/bin/python benchmarks/kernels_aot.py --out RECORD.json

Compiling needs the CUDA wheels (ptxas, libdevice), no driver. A row of the record is one program: the
kernel by itself with a config, or the whole operation of a named implementation (`op`), with the tcgen05
instructions of its PTX and what ptxas says of registers and spills. Nothing is run.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import provenance
from jax.experimental import topologies

from pallas_kernels import formats
from pallas_kernels.dispatch import Facts
from pallas_kernels.packed_matmul import packed_matmul, sm100
from pallas_kernels.packed_matmul.block_scaled import SCALE_DTYPES, Coded
from pallas_kernels.packed_matmul.sm100 import Config

#: What the compiler asks of a GPU, for an NVIDIA B200.
B200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 148 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 8000000000000 l2_cache_size: 132644864 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } device_description_str: "NVIDIA B200"
"""

Residual = Literal["none", "shared", "own"]
SHAPE = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One program: its name in the record, a function and the shapes of its arguments."""

    name: str
    run: Callable[..., jax.Array]
    args: Any


def kernel(fmt: str, config: Config, residual: Residual, out: str = "bfloat16") -> Program:
    """The kernel by itself at 512 x 1024 and two tiles of tokens; "own" row scales have sums of their own."""
    m, n, k = 2 * config.tile_m, 512, 1024

    def operand(rows: int, columns: int, tiles: int) -> tuple[SHAPE, ...]:
        if config.mma == "dense":
            return (SHAPE((rows, columns), jnp.bfloat16),)
        scales = (tiles, columns // formats.FORMATS[fmt].BLOCK // 4, 32, 16)
        return SHAPE((rows, columns), jnp.float4_e2m1fn), SHAPE(scales, SCALE_DTYPES[fmt])

    scale_tiles = 2 * sm100.scale_tiles(config)
    args = dict(
        w=operand(n, k, n // sm100.ROWS),
        x=operand(m, k, scale_tiles),
        row_scale=SHAPE((m,), jnp.float32),
        scale=SHAPE((1,), jnp.float32),
    )
    if residual != "none":
        args["residual"] = operand(m, k // 2, scale_tiles)
    if residual == "own":
        args["residual_scale"] = SHAPE((m,), jnp.float32)

    def run(args):
        return sm100.matmul(**args, fmt=fmt, config=config, out_dtype=jnp.dtype(out))

    tiles = f"{config.mma} blocks={config.blocks} tile_m={config.tile_m}"
    return Program(name=f"{fmt} {tiles} residual={residual} out={out}", run=run, args=args)


def operation(fmt: str, impl: str, m: int, residual_k: int) -> Program:
    """`packed_matmul` by a named implementation, the packed weight 320 x 1536."""
    n, k, f = 320, 1536, formats.FORMATS[fmt]
    packed = SHAPE((n // 64, k // f.BLOCK_K, f.CODE_ROWS + f.SCALE_ROWS, 128), jnp.uint32)
    rows = SHAPE((m,), jnp.float32)

    def tokens(columns: int):
        if impl == "sm100_decoded":
            return SHAPE((m, columns), jnp.bfloat16)
        codes, scales = ((m, columns // 2), (m, columns // f.BLOCK))
        shapes: Any = SHAPE(codes, jnp.uint8), SHAPE(scales, jnp.uint8), rows
        return Coded(*shapes)

    x_dtype = "bfloat16" if impl == "sm100_decoded" else fmt
    facts = Facts(platform="gpu", capability=(10, 0), m=m, n=n, k=k, x_dtype=x_dtype, w_dtype=fmt)

    def run(x, packed, row_scale, scale, residual):
        return packed_matmul(x, packed, row_scale, scale, fmt=fmt, facts=facts, residual=residual, impl=impl)

    residual = tokens(residual_k) if residual_k else None
    args = (tokens(k), packed, rows, SHAPE((1,), jnp.float32), residual)
    return Program(name=f"op {impl} {fmt} m={m} residual_k={residual_k}", run=run, args=args)


def programs() -> list[Program]:
    """Every kind of call: formats, one block and pairs, second terms, whole operations."""
    found = []
    residuals: tuple[Residual, ...] = ("none", "shared", "own")
    for fmt in SCALE_DTYPES:
        for blocks, tile_m in ((1, 8), (1, 128), (2, 32), (2, 128)):
            config = Config(mma="block_scaled", blocks=blocks, tile_m=tile_m, stages=3)
            found += [kernel(fmt, config, residual) for residual in residuals]
        found.append(kernel(fmt, Config(mma="block_scaled", blocks=2, tile_m=256), "none", "float32"))
    for blocks, tile_m in ((1, 8), (2, 64)):
        config = Config(mma="dense", blocks=blocks, tile_m=tile_m, tile_k=64)
        found += [kernel("hif4", config, residual) for residual in residuals[:2]]
    found += [operation(fmt, "sm100", m, k) for fmt in SCALE_DTYPES for m, k in ((5, 512), (300, 0))]
    found += [operation("hif4", "sm100_decoded", m, k) for m, k in ((5, 512), (300, 0))]
    return found


def compiled(program: Program, device: Any) -> dict[str, Any]:
    """A row of the record."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda a: SHAPE(a.shape, a.dtype, sharding=sharding), program.args)
    arguments = (args,) if isinstance(args, dict) else args
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        with jax.default_device(device):  # makes Mosaic GPU lower for this device's compute capability
            jax.jit(program.run).trace(*arguments).lower().compile()
        (ptx,) = (path.read_text() for path in Path(folder).glob("*.ptx"))
        (report,) = (path.read_text() for path in Path(folder).glob("*.ptxas"))
    used = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    target = re.search(r"\.target (\S+)", ptx)
    assert used and spills and target, report
    return {
        "program": program.name,
        "target": target[1],
        "instructions": dict(sorted(collections.Counter(re.findall(r"tcgen05\.(?:mma|cp)\S*", ptx)).items())),
        "line": next(line.strip() for line in ptx.splitlines() if "tcgen05.mma" in line),
        "registers": int(used[1]),
        "spilled_bytes": int(spills[1]) + int(spills[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a cached program leaves no PTX
    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=B200)
    rows = []
    for program in programs():
        if args.only in program.name:
            rows.append(compiled(program, topology.devices[0]))
            print(rows[-1]["program"], rows[-1]["instructions"], flush=True)
    record = {
        "date": provenance.now(),
        "commit": provenance.commit(),
        "jax": jax.__version__,
        "target_device": "NVIDIA B200, compiled for and not run",
        "rows": rows,
    }
    lines = ",\n".join(json.dumps(row) for row in record.pop("rows"))
    head = json.dumps(record)[:-1]
    args.out.write_text(f'{head},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
