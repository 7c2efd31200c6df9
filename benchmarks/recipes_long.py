"""Trains every recipe for many steps at once on one GPU and keeps their courses in one record.

    python benchmarks/recipes_long.py OUTPUT.json [--config configs/demo.toml] [--steps 200] [--seeds 0]
    python benchmarks/recipes_long.py OUTPUT.json --page docs/RESULTS.md

Each arm is a process of its own, `fp4rl train` with `recipe.name`, `run.seed` and `loop.steps` set, and
all of them share the device, so that the times of a step are not those of an arm alone. An arm
that is still at work after `--limit` seconds is stopped and its record says how far it came.
With `--page` nothing is run: the record's table and picture become a section of that page.
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

import jax
import matplotlib
import numpy as np

from fp4rl_jax import plugins, recipes
from fp4rl_jax.runs.files import read_lines
from fp4rl_jax.runs.report.sections import with_section

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

HEADING = "## Every recipe over many steps"
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


def picture(record: dict[str, Any], path: Path) -> None:
    """Reward and k3 of every arm over the steps, means of ten steps."""
    figure, (reward, gap) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, arm in record["arms"].items():
        for axes, key in ((reward, "reward_mean"), (gap, "mismatch_kl")):
            values = np.asarray(arm[key])[: len(arm[key]) // 10 * 10].reshape(-1, 10).mean(axis=1)
            axes.plot(10 * np.arange(1, len(values) + 1), values, label=name, linewidth=1.4)
    reward.set(xlabel="step", ylabel="reward", ylim=(0, 1))
    gap.set(xlabel="step", ylabel="k3 of trainer and rollout, nats a token", yscale="symlog")
    gap.set_yscale("symlog", linthresh=1e-6)
    reward.legend(fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def section(record: dict[str, Any], image: str) -> str:
    """The record as a section of a page."""
    lines = [
        HEADING,
        "",
        f"`benchmarks/recipes_long.py`, {record['config']}, {record['steps']} steps, {record['device']}, all",
        "arms at once. One seed, so a difference between neighbours in this table is an anecdote. Reward and",
        "k3 are those of the sampled completions, pass@1 that of the quantized policy on held-out problems,",
        "with 95 % intervals.",
        "",
        f"![reward and mismatch over the steps]({image})",
        "",
        "| recipe | reward, first 20 steps | steps 91-110 | last 20 | k3: median | worst | largest gap, nats "
        "| pass@1 before | after |",
        "| --- " * 9 + "|",
    ]
    for name, arm in record["arms"].items():
        reward, k3 = arm["reward_mean"], arm["mismatch_kl"]
        evals = {line["name"]: line for line in arm["evaluations"]}
        shown = [_interval(evals[when]) for when in ("before", "after") if when in evals]
        means = [f"{statistics.mean(part):.2f}" for part in (reward[:20], reward[90:110], reward[-20:])]
        cells = [
            f"`{name}`", *means, f"{statistics.median(k3):.1e}", f"{max(k3):.1e}",
            f"{max(arm['logprob_gap_max']):.1f}", *shown,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _interval(line: dict[str, Any]) -> str:
    return f"{line['value']:.3f} [{line['low']:.2f}, {line['high']:.2f}]"


def write_page(record: dict[str, Any], page: Path) -> None:
    """Replaces the section of that heading, or adds it at the end; what stands below its table is kept."""
    image = page.parent / "img" / "recipes_long.png"
    picture(record, image)
    made = section(record, f"img/{image.name}")
    page.write_text(with_section(page.read_text(encoding="utf-8"), HEADING, made), encoding="utf-8")


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
    parser.add_argument(
        "--page", type=Path, help="write the record's section into this page, and run nothing"
    )
    options = parser.parse_args()
    if options.page:
        write_page(json.loads(options.output.read_text(encoding="utf-8")), options.page)
        return 0
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
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
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
