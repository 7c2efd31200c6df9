"""Trains every recipe for many steps at once on one GPU and keeps their courses in one record.

    python benchmarks/recipes_long.py OUTPUT.json [--config configs/demo.toml] [--steps 200] [--seeds 0]

Each arm is a process of its own, `fp4rl train` with `recipe.name`, `run.seed` and `loop.steps` set, and
all of them share the device, so that the times of a step are not those of an arm alone. An arm
that is still at work after `--limit` seconds is stopped and its record says how far it came.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fp4rl_jax import plugins, recipes
from fp4rl_jax.runs.files import read_lines

COURSE = ("reward_mean", "mismatch_kl", "logprob_gap_max", "entropy", "completion_length_mean")


def start(recipe: str, seed: int, options: argparse.Namespace) -> subprocess.Popen:
    """One arm as a process; its output goes beside its run."""
    name = f"{recipe}-{seed}"
    words = [
        f"recipe.name={recipe}", f"run.name={name}", f"run.root={options.runs}", f"run.seed={seed}",
        f"loop.steps={options.steps}",
    ]  # fmt: skip
    flags = [flag for word in [*words, *options.set] for flag in ("--set", word)]
    options.runs.mkdir(parents=True, exist_ok=True)
    log = (options.runs / f"{name}.log").open("w")
    command = [sys.executable, "-m", "fp4rl_jax", "train", "--config", options.config, *flags]
    share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | share)


def course(folder: Path) -> dict[str, Any]:
    """What an arm's metrics say: its course, its evaluations, and medians of the phases' seconds."""
    rows = read_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    steps = [row for row in rows if "reward_mean" in row]
    found: dict[str, Any] = {"steps": len(steps)}
    for key in COURSE:
        found[key] = [round(row[key], 6) for row in steps if key in row]
    seconds = {key for row in steps for key in row if key.endswith("_seconds")}
    found["seconds"] = {
        key: statistics.median(row[key] for row in steps[1:] if key in row)
        for key in sorted(seconds)
        if len(steps) > 1
    }
    evals = folder / "evals.jsonl"
    found["evaluations"] = read_lines(evals) if evals.exists() else []
    return found


def main() -> int:
    """Starts the arms, waits for them, writes the record; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--config", default="configs/demo.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs/long"))
    parser.add_argument("--recipes", nargs="+", default=plugins.names(recipes))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", nargs="*", default=[], help="further settings, key=value")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    options = parser.parse_args()
    began = time.monotonic()
    arms = {(r, s): start(r, s, options) for s in options.seeds for r in options.recipes}
    codes: dict[str, int | None] = {}
    for (recipe, seed), process in arms.items():
        try:
            codes[f"{recipe}-{seed}"] = process.wait(max(options.limit - (time.monotonic() - began), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            codes[f"{recipe}-{seed}"] = None
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": options.config,
        "set": options.set,
        "steps": options.steps,
        "wall_seconds": round(time.monotonic() - began),
        "exit_codes": codes,
        "arms": {name: course(options.runs / name) for name in codes},
    }
    options.output.write_text(json.dumps(record) + "\n")
    for name, arm in record["arms"].items():
        rewards = arm["reward_mean"]
        shown = f"{statistics.mean(rewards[-10:]):.3f}" if rewards else "none"
        print(f"{name:24s} exit {codes[name]}, {arm['steps']} steps, reward of the last ten {shown}")
    return 0 if all(code == 0 for code in codes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
