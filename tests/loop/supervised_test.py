"""`fp4rl sft` from its configuration to its folder: it learns, resumes bit for bit, and draws its keys."""

from pathlib import Path

import numpy as np
import pytest

from fp4rl_jax import interchange
from fp4rl_jax.cli.sft import train
from fp4rl_jax.config import load
from fp4rl_jax.runs import catalogue, exit_codes
from fp4rl_jax.runs.files import read_lines

ROOT = Path(__file__).parents[2]


def sft(folder: Path, steps: int) -> list[dict]:
    """Trains the tiny model of configs/ci with gradients rounded at random; gives its metrics."""
    words = [
        f"run.root={folder}", "run.tensorboard=off", "run.progress=off", "run.resume=auto",
        "run.checkpoint_every=2", f"loop.steps={steps}", "eval.problems=0", "trainer.optim.lr=1e-2",
        "recipe.name=rollout_resq", "recipe.format=nvfp4", "recipe.rounding=stochastic",
    ]  # fmt: skip
    output = folder / f"model{steps}"
    assert train(load([str(ROOT / "configs/ci/grpo.toml")], words), output=str(output)) == exit_codes.OK
    return [catalogue.without_clock(line) for line in read_lines(folder / "ci-grpo" / "metrics.jsonl")]


@pytest.mark.slow
def test_it_learns_with_random_rounding_and_resumes_bit_for_bit(tmp_path):
    whole = sft(tmp_path / "whole", steps=4)
    assert catalogue.undocumented(whole[0]) == []
    assert [line["updates_skipped"] for line in whole] == [0.0] * 4
    assert whole[3]["loss"] < whole[0]["loss"]
    sft(tmp_path / "cut", steps=2)
    assert sft(tmp_path / "cut", steps=4) == whole
    made, again = (
        interchange.load(str(tmp_path / name / "model4"), dtype="float32") for name in ("whole", "cut")
    )
    np.testing.assert_array_equal(made.params["layers"]["mlp"]["up"], again.params["layers"]["mlp"]["up"])
