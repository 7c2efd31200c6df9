"""Writes tests/golden/runs/ anew: the metrics of a tiny run of every recipe found in its folder.

Run it after a change of numerics, and read the diff: it is what the change means for training.

    python tools/write_run_goldens.py            # all recipes
    python tools/write_run_goldens.py bf16       # some
"""

import json
import sys
import tempfile
from pathlib import Path

from fp4rl_jax import config, plugins, recipes
from fp4rl_jax.cli.train import train
from fp4rl_jax.runs.files import read_lines

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "runs"
LETTERS = ROOT / "tests" / "golden" / "letters.py"
RECIPES = plugins.names(recipes)
STEPS = 20

#: Counts, and means of counts over a power of two: no rounding anywhere.
EXACT = (
    "params_version", "reward_mean", "completion_length_mean", "finished_share", "sampled_tokens",
    "mixed_groups_share", "updates_skipped",
)  # fmt: skip
#: What float32 sums go into.
ROUNDED = (
    "entropy", "grad_norm", "mismatch_kl", "logprob_gap_mean", "logprob_gap_max", "prob_gap_max",
    "effective_sample_size", "quant/weights/mlp/down/underflow", "quant/rollout/mlp/down/underflow",
    "quant/trainer/mlp/down/underflow",
)  # fmt: skip

#: Over configs/ci/grpo.toml. Activations are float32, so that a CPU which adds in another order moves
#: them by rounding alone; one layer, so that there is little to compile.
SETTINGS = (
    "run.tensorboard=off", "run.progress=off", "run.transcripts_every=0",
    "loop.group_size=8", "model.shape.num_layers=1", "trainer.dtype=float32", "trainer.remat=none",
    "trainer.optim.lr=3e-3", "rollout.dtype=float32", "rollout.max_new_tokens=4", "rollout.prompt_width=64",
    "task.name=callable", f"task.reward={LETTERS}:reward", f"task.train={LETTERS}:rows",
    f"task.eval={LETTERS}:held_out_rows",
)  # fmt: skip


def run(recipe: str, folder: Path, steps: int = STEPS) -> dict[str, list[float | None]]:
    """The metrics of a run of `recipe` under `folder`, a list over steps by key; absent ones left out."""
    words = [
        *SETTINGS,
        f"loop.steps={steps}",
        f"recipe.name={recipe}",
        f"run.root={folder}",
        f"run.name={recipe}",
    ]
    code = train(config.load([str(ROOT / "configs" / "ci" / "grpo.toml")], words))
    if code:
        raise RuntimeError(f"the run of {recipe} ended with exit code {code}")
    lines = read_lines(folder / recipe / "metrics.jsonl")
    return {key: [line[key] for line in lines] for key in (*EXACT, *ROUNDED) if key in lines[0]}


def text(metrics: dict[str, list[float | None]]) -> str:
    """One line a key; float32 values in the fewest digits that give them back."""
    rows = [f"  {json.dumps(key)}: {json.dumps(values)}" for key, values in metrics.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main(names: list[str]) -> None:
    """Writes the files of the named recipes, or of all of them without the files of recipes that are gone."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    if not names:
        for path in GOLDEN.glob("*.json"):
            path.unlink()
    for name in names or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{name}.json").write_text(text(run(name, Path(folder))), encoding="utf-8")
        print((GOLDEN / f"{name}.json").relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
