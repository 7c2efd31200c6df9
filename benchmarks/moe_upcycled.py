"""Upcycled SmolLM2 under FP4 rollouts, with and without routing replay: what the routers disagree on.

    python benchmarks/moe_upcycled.py [--source models/smollm2] [--runs runs/moe_smollm2] [--set KEY=VALUE]
        [--arms qat_w4a4_on ...] [--into RECORD.json] [--report_only] [--json OUTPUT.json]
        [--results docs/RESULTS.md]

Makes a mixture of 8 experts, 2 active, of the dense model; teaches it the task by `fp4rl sft`
(configs/experiments/moe_smollm2_warm_up.toml); then trains `naive_nvfp4` and `qat_w4a4` on
configs/experiments/moe_smollm2.toml from the same keys, each with the rollout's experts recorded and
compared only (`measure`) and with them replayed (`on`); `--arms` runs some of the four.
What is finished is not run again. One JSON record holds every step of every arm, those of `--into` included
that were not run now; `--results` puts the table into that page.
"""

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from fp4rl_jax.runs.files import read_lines
from fp4rl_jax.runs.report.sections import with_section

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "experiments"
RECIPES = ("naive_nvfp4", "qat_w4a4")
REPLAYS = ("measure", "on")
KEPT = (
    "mismatch_kl", "logprob_gap_max", "moved_share", "moe/changed_share", "moe/load_max", "moe/load_entropy",
    "moe/router_entropy", "moe/dropped_share", "guidance_bytes_per_token", "reward_mean", "step_seconds",
    "sampled_tokens",
)  # fmt: skip
HEADING = "## Routing replay on an upcycled SmolLM2"


def fp4rl(*words: str) -> None:
    """One command of fp4rl; a failure ends this script with its exit code."""
    print("== fp4rl", *words, file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, "-m", "fp4rl_jax", *words]).returncode
    if code:
        raise SystemExit(code)


def arms() -> dict[str, tuple[str, str]]:
    """{name of the run: recipe and replay}."""
    return {f"{recipe}_{replay}": (recipe, replay) for recipe, replay in itertools.product(RECIPES, REPLAYS)}


def run(asked: argparse.Namespace) -> None:
    """Everything that is not there yet."""
    mixture, taught = asked.runs / "upcycled", asked.runs / "warm_up"
    if not mixture.exists():
        fp4rl(
            "upcycle", asked.source, str(mixture), "--experts", "8", "--active", "2", "--noise", asked.noise
        )
    shared = [f"run.root={asked.runs}", "run.resume=auto", *asked.set]
    if not (taught / "model").exists():
        settings = [*shared, f"model.path={mixture}", "run.name=warm_up"]
        fp4rl("sft", "--config", str(CONFIGS / "moe_smollm2_warm_up.toml"), *_sets(settings, asked.warm_up))
    for name in asked.arms:
        recipe, replay = arms()[name]
        chosen = [f"recipe.name={recipe}", f"moe.replay={replay}", f"run.name={name}"]
        settings = [*shared, f"model.path={taught / 'model'}", *chosen]
        fp4rl("train", "--config", str(CONFIGS / "moe_smollm2.toml"), *_sets(settings, asked.train))


def _sets(*groups: list[str]) -> list[str]:
    return [word for setting in itertools.chain(*groups) for word in ("--set", setting)]


def record(runs: Path, names: list[str], earlier: dict[str, Any]) -> dict[str, Any]:
    """All steps of the named arms, their evaluations and where they ran, beside an earlier record's arms."""
    manifest = json.loads((runs / names[0] / "manifest.json").read_text(encoding="utf-8"))
    found = {name: arm(runs / name) for name in names}
    where = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": manifest["backend"],
        "jax": manifest["versions"]["jax"],
        "warm_up": [line["loss"] for line in read_lines(runs / "warm_up" / "metrics.jsonl")],
    }
    if not earlier:
        return {**where, "arms": found}
    later = {name: {**one, "run": where} for name, one in found.items()}
    kept = {**earlier["arms"], **later}
    return {**earlier, "arms": {name: kept[name] for name in arms() if name in kept}}


def arm(folder: Path) -> dict[str, Any]:
    """One arm: what is kept of each step, and the evaluations."""
    lines = read_lines(folder / "metrics.jsonl")
    steps = {key: [line[key] for line in lines] for key in KEPT if key in lines[0]}
    evals = {
        line["name"]: {key: line.get(key) for key in ("value", "low", "high")}
        for line in read_lines(folder / "evals.jsonl")
    }
    return {"steps": steps, "evals": evals}


def page(found: dict[str, Any]) -> str:
    """The section of docs/RESULTS.md."""
    steps = len(next(iter(found["arms"].values()))["steps"]["mismatch_kl"])
    lines = [
        HEADING,
        "",
        "`python benchmarks/moe_upcycled.py`: SmolLM2 with 8 experts, 2 active, warmed up on the task, then",
        f"{steps} steps an arm from the same keys on a {found['backend']}; one seed. Changed experts: share",
        "of the tokens, over layers, whose own set of experts in the trainer is not the rollout's. In step 0",
        "both arms of a recipe sample the same tokens.",
        "",
        "| recipe | replay | changed experts: step 0 | median | k3, nats a token: step 0 | median | worst "
        "| largest gap, nats | pass@1 before | after |",
        "| --- " * 10 + "|",
    ]
    lines += [_row(*arms()[name], one) for name, one in found["arms"].items()]
    return "\n".join(lines) + "\n"


def _row(recipe: str, replay: str, one: dict[str, Any]) -> str:
    steps, evals = one["steps"], one["evals"]
    changed, gaps = steps["moe/changed_share"], steps["mismatch_kl"]
    cells = [
        f"`{recipe}`", "on" if replay == "on" else "off", f"{changed[0]:.2%}",
        f"{statistics.median(changed):.2%}", f"{gaps[0]:.3g}", f"{statistics.median(gaps):.3g}",
        f"{max(gaps):.3g}", f"{max(steps['logprob_gap_max']):.2f}",
        *(f"{evals[name]['value']:.2f}" if name in evals else "-" for name in ("before", "after")),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Runs what is missing, prints the table, writes what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", default="models/smollm2", help="the dense model")
    parser.add_argument("--noise", default="0.1", help="of the upcycling")
    parser.add_argument("--runs", type=Path, default=Path("runs/moe_smollm2"))
    parser.add_argument("--set", action="append", default=[], help="a setting of warm-up and arms")
    parser.add_argument("--warm_up", action="append", default=[], help="a setting of the warm-up alone")
    parser.add_argument("--train", action="append", default=[], help="a setting of the arms alone")
    parser.add_argument("--arms", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--into", type=Path, help="a record whose other arms are kept")
    parser.add_argument("--report_only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    if not asked.report_only:
        run(asked)
    earlier = json.loads(asked.into.read_text(encoding="utf-8")) if asked.into else {}
    found = record(asked.runs, asked.arms, earlier)
    print(page(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if asked.results:
        old = asked.results.read_text(encoding="utf-8")
        asked.results.write_text(with_section(old, HEADING, page(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
