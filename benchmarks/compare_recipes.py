"""Trains the five recipes from the same keys and writes docs/RESULTS.md with its picture.

    python benchmarks/compare_recipes.py [--config configs/demo.toml] [--runs runs/compare] [--steps 24]
        [--report_only]

Each arm is `fp4rl train` on the same configuration with `recipe.name` set: the same data order and
sampling keys, as many steps. Arms that are finished are not run again; `--report_only` only writes the
table and the picture from the runs that are there.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp4rl_jax.runs.files import read_lines

RECIPES = ("bf16", "fp8_rollout", "naive_nvfp4", "qat_w4a4", "qat_w4a16")
DOCS = Path(__file__).resolve().parent.parent / "docs"
INTRO = """# Results

`make compare` makes this page: five recipes, the same model, task, data order and keys, {steps} steps.

{setting}.

One seed an arm, so a difference between two arms' rewards is an anecdote. The gap columns rest on some
{tokens} sampled tokens an arm: k3, the estimate of KL(rollout, trainer) in nats a token. "Step-0 gap" is
before any update: what the recipe itself does to the same weights.

"""


def main() -> int:
    """Runs the arms that are missing, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", default="configs/demo.toml")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument("--steps", type=int, default=24, help="of every arm")
    parser.add_argument("--report_only", action="store_true")
    asked = parser.parse_args()
    if not asked.report_only:
        for recipe in RECIPES:
            code = train(recipe, config=asked.config, runs=asked.runs, steps=asked.steps)
            if code:
                print(
                    f"{recipe} ended with exit code {code}; its run is {asked.runs / recipe}", file=sys.stderr
                )
                return code
    write_page(asked.runs)
    return 0


def train(recipe: str, *, config: str, runs: Path, steps: int) -> int:
    """Trains one arm, or resumes it; returns the exit code."""
    words = [
        f"recipe.name={recipe}", f"run.name={recipe}", f"run.root={runs}", "run.resume=auto",
        f"loop.steps={steps}",
    ]  # fmt: skip
    flags = [flag for word in words for flag in ("--set", word)]
    print(f"== {recipe}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", "fp4rl_jax", "train", "--config", config, *flags]).returncode


def write_page(runs: Path) -> None:
    """docs/RESULTS.md and docs/img/compare.png from the runs."""
    arms = {recipe: runs / recipe for recipe in RECIPES}
    rows = {recipe: summary(folder) for recipe, folder in arms.items()}
    first = json.loads((arms["bf16"] / "config.json").read_text())
    manifest = json.loads((arms["bf16"] / "manifest.json").read_text())
    loop = first["loop"]
    greedy = (
        "greedy" if first["eval"]["temperature"] == 0 else f"at temperature {first['eval']['temperature']}"
    )
    setting = (
        f"{first['model']['path'].split('/')[-1]}, "
        f"{loop['num_prompts']} prompts x {loop['group_size']} completions, "
        f"AdamW {first['trainer']['optim']['lr']:g}, both sides bfloat16, {manifest['backend']} "
        f"({manifest['host']['machine']}), jax {manifest['versions']['jax']}; pass@1 {greedy} on "
        f"{first['eval']['problems']} held-out problems"
    )
    tokens = round(sum(r["sampled_tokens"] for r in read_lines(arms["bf16"] / "metrics.jsonl")), -3)
    head = INTRO.format(steps=loop["steps"], setting=setting, tokens=int(tokens))
    naive, symmetric = rows["naive_nvfp4"]["gap"], rows["qat_w4a4"]["gap"]
    ratio = (
        f"\nThe naive arm's step-0 gap is {naive / symmetric:.0f} times the symmetric arm's.\n"
        if symmetric
        else ""
    )
    picture = draw(arms)
    page = head + table(rows) + ratio + f"\n![reward and mismatch of the five recipes](img/{picture.name})\n"
    results = DOCS / "RESULTS.md"
    old = results.read_text(encoding="utf-8") if results.exists() else ""
    others = old[old.index("\n## ") :] if "\n## " in old else ""  # sections of other benchmarks
    results.write_text(page + others, encoding="utf-8")
    print(page)


def summary(folder: Path) -> dict[str, Any]:
    """The numbers of one arm."""
    metrics = read_lines(folder / "metrics.jsonl")
    evals = {line["name"]: line for line in read_lines(folder / "evals.jsonl")}
    kl = [row["mismatch_kl"] for row in metrics]
    return {
        "gap": kl[0],
        "median": statistics.median(kl),
        "worst": max(kl),
        "gap_max": max(row["logprob_gap_max"] for row in metrics),
        "reward": (metrics[0]["reward_mean"], statistics.mean(row["reward_mean"] for row in metrics[-4:])),
        "seconds": statistics.median(row["step_seconds"] for row in metrics[1:]),
        "evals": evals,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The arms as a markdown table."""
    head = (
        "| recipe | step-0 gap | median gap | worst gap | largest log-prob gap | reward first -> last 4 "
        "| pass@1 before | after | after - before [95 %] | s/step |\n" + "| --- " * 10 + "|\n"
    )
    return head + "".join(_row(recipe, row) for recipe, row in rows.items())


def _row(recipe: str, row: dict[str, Any]) -> str:
    evals, (first, last) = row["evals"], row["reward"]
    change = evals["difference"]
    cells = [
        f"`{recipe}`", f"{row['gap']:.2g}", f"{row['median']:.2g}", f"{row['worst']:.2g}",
        f"{row['gap_max']:.2f}", f"{first:.2f} -> {last:.2f}",
        f"{evals['before']['value']:.2f}", f"{evals['after']['value']:.2f}",
        f"{change['value']:+.2f} [{change['low']:+.2f}, {change['high']:+.2f}]", f"{row['seconds']:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def draw(arms: dict[str, Path]) -> Path:
    """Reward and mismatch over steps, one line an arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for recipe, folder in arms.items():
        metrics = read_lines(folder / "metrics.jsonl")
        steps = [row["step"] for row in metrics]
        left.plot(steps, [row["reward_mean"] for row in metrics], label=recipe)
        right.semilogy(steps, [max(row["mismatch_kl"], 1e-9) for row in metrics], label=recipe)
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Reward")
    right.set(xlabel="step", ylabel="k3, nats per token (floored at 1e-9)", title="Rollout-trainer mismatch")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    (DOCS / "img").mkdir(exist_ok=True)
    path = DOCS / "img" / "compare.png"
    figure.savefig(path, dpi=130)
    return path


if __name__ == "__main__":
    sys.exit(main())
