"""Whether a resumed run is the uninterrupted one, bit for bit, with and without the determinism flags.

    python benchmarks/resume_gpu.py --json OUTPUT.json

`fp4rl train` on a random model (`--model`), its rollouts in NVFP4 W4A4, as processes of their own and without
a compilation cache: one run of `--steps` steps, and one that stops after `--first` of them and is resumed.
The environments are `launch/env.sh`, and `launch/deterministic.sh` after it. Metrics (clocks left out)
and every leaf of the last checkpoint are compared. One run at a time has the device; nothing is timed: what
the flags cost is `benchmarks/rl_step.py` with and without them in XLA_FLAGS.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import provenance

from fp4rl_jax.config import load
from fp4rl_jax.runs import catalogue
from fp4rl_jax.runs.files import read_lines

ROOT = Path(__file__).parents[1]
BASE = str(ROOT / "configs/ci/grpo.toml")
SHAPES = {
    "tiny": [],
    "smollm2": [
        "model.shape.num_layers=30", "model.shape.d_model=576", "model.shape.num_heads=9",
        "model.shape.num_kv_heads=3", "model.shape.head_dim=64", "model.shape.d_ff=1536",
        "rollout.max_new_tokens=64", "loop.num_prompts=16", "loop.group_size=8",
    ],
}  # fmt: skip
#: Files of `launch/`, sourced one after the other.
ENVIRONMENTS = {"deterministic": ("env.sh", "deterministic.sh"), "free": ("env.sh",)}


def words(options: argparse.Namespace, folder: Path, steps: int) -> list[str]:
    """The settings of one run."""
    return [
        *SHAPES[options.model], *options.set, f"run.root={folder}", "run.tensorboard=off", "run.progress=off",
        "run.resume=auto", f"run.checkpoint_every={options.first}", f"loop.steps={steps}", "eval.problems=0",
    ]  # fmt: skip


def shell_of(environment: str, command: list[str]) -> tuple[str, dict[str, str]]:
    """The shell line and the variables of a command in one of the environments."""
    line = "; ".join(
        (*(f". launch/{file}" for file in ENVIRONMENTS[environment]), f"exec {shlex.join(command)}")
    )
    bare = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    path = os.pathsep.join(filter(None, (str(ROOT), bare.get("PYTHONPATH"))))
    return line, bare | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}


def start(options: argparse.Namespace, environment: str, folder: Path, steps: int) -> subprocess.Popen:
    """Starts `fp4rl train` up to a step, in one of the environments."""
    command = [sys.executable, "-m", "fp4rl_jax", "train", "--config", BASE]
    for word in words(options, folder, steps):
        command += ["--set", word]
    line, bare = shell_of(environment, command)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("a") as log:
        return subprocess.Popen(["sh", "-c", line], cwd=ROOT, env=bare, stdout=log, stderr=log)


def finish(process: subprocess.Popen, folder: Path) -> None:
    """Waits.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    if process.wait() != 0:
        raise RuntimeError(
            f"{folder} ended with {process.returncode}:\n{(folder / 'log').read_text()[-3000:]}"
        )


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Metrics of every step."""
    return read_lines(folder / "ci-grpo" / "metrics.jsonl")


def leaves(options: argparse.Namespace, folder: Path) -> dict[str, np.ndarray]:
    """Every leaf of the last checkpoint, by path."""
    from fp4rl_jax import models
    from fp4rl_jax.cli import _job
    from fp4rl_jax.runs import Checkpointer
    from fp4rl_jax.trainer import abstract_state

    made = _job.builder(load([BASE], words(options, folder, options.steps)))
    template = abstract_state(models.abstract_params(made.model), made.learner.subset, made.config.trainer)
    state = Checkpointer(folder / "ci-grpo" / "checkpoints").restore(template).state
    found = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def compared(options: argparse.Namespace, whole: Path, parts: Path) -> dict[str, Any]:
    """What of both runs differs."""
    ours, theirs = ([catalogue.without_clock(line) for line in lines_of(folder)] for folder in (whole, parts))
    names = sorted({key for a, b in zip(ours, theirs, strict=True) for key in a if a[key] != b.get(key)})
    steps = [a["step"] for a, b in zip(ours, theirs, strict=True) if a != b]
    first, second = leaves(options, whole), leaves(options, parts)
    differ = [path for path, leaf in first.items() if leaf.tobytes() != second[path].tobytes()]
    return {
        "steps": len(ours),
        "grad_norms": [line["grad_norm"] for line in ours],
        "first_step_that_differs": steps[0] if steps else None,
        "metrics_that_differ": names,
        "leaves": len(first),
        "leaves_that_differ": len(differ),
        "equal": not names and not differ and first.keys() == second.keys(),
    }


def main() -> None:
    """Runs, compares, prints, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--first", type=int, default=3, help="steps before the interruption")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, section.key=value")
    parser.add_argument(
        "--environments", nargs="+", choices=sorted(ENVIRONMENTS), default=sorted(ENVIRONMENTS)
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "date": provenance.now(),
        "commit": provenance.commit(),
        "jax": jax.__version__,
        "settings": words(options, Path("runs"), options.steps),
    }
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        for name in options.environments:
            whole, parts = top / name / "whole", top / name / "parts"
            for folder, steps in ((whole, options.steps), (parts, options.first), (parts, options.steps)):
                finish(start(options, name, folder, steps), folder)
            record[name] = compared(options, whole, parts)
            print(json.dumps({name: record[name]}), flush=True)
    record |= {"device": jax.devices()[0].device_kind, "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(record, indent=2))
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
