"""`fp4rl sft` from its configuration to its folder: it learns, resumes bit for bit, and draws its keys."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import interchange
from fp4rl_jax.cli import _job
from fp4rl_jax.cli._sft_job import supervised
from fp4rl_jax.cli.sft import train
from fp4rl_jax.config import load
from fp4rl_jax.data import Examples, pack_examples
from fp4rl_jax.loop.supervised import SupervisedParts, batch_of, supervised_step
from fp4rl_jax.runs import catalogue, exit_codes
from fp4rl_jax.runs.files import read_lines
from fp4rl_jax.trainer import backbone, update

ROOT = Path(__file__).parents[2]
TINY = (
    "model.shape.vocab_size=272", "model.shape.num_layers=1", "model.shape.d_model=32", "model.shape.d_ff=32",
    "model.shape.num_heads=2", "model.shape.max_length=256", "recipe.name=rollout_resq",
    "recipe.format=nvfp4", "rollout.prompt_width=64", "rollout.max_new_tokens=8", "task.high=12",
)  # fmt: skip


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


def packed_parts(rounding: str) -> tuple[_job.Builder, SupervisedParts]:
    """A tiny model whose gradients are rounded as asked, and one batch of packed rows, drawn for ever."""
    made = _job.builder(load([], [*TINY, f"recipe.rounding={rounding}"]))

    def draw() -> Examples:
        items = iter([made.task.train[index] for index in range(64)])
        return pack_examples(made.tokenizer, lambda: next(items), lambda: None, rows=2, width=160)

    base = backbone(made.state().frozen, model=made.model, side=made.sides.trainer)
    return made, SupervisedParts(
        learner=supervised(made.learner), draw=draw, prompt_width=64, base=base, key=jax.random.key(3)
    )


@pytest.mark.slow
def test_packed_rows_get_the_key_of_random_rounding():
    """Traced only: with a key an update of packed rows has its shapes, without one it is refused."""
    made, parts = packed_parts("stochastic")
    batch, step = batch_of(parts.draw(), prompt_width=64), partial(update, learner=parts.learner)
    state, outcome = jax.eval_shape(step, made.state(), batch, parts.base, key=parts.key)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, made.state())
    assert outcome.trainer_logprobs.shape == batch.tokens.shape
    with pytest.raises(ValueError, match="key"):
        jax.eval_shape(step, made.state(), batch, parts.base, key=None)


def packed_gradients(numbers: list[int], rounding: str) -> list[float]:
    """The gradient norm of step `number` of one state on one batch of packed rows."""
    made, parts = packed_parts(rounding)
    found = []
    for number in numbers:
        _, step = supervised_step(made.state(), number, parts)
        assert step.row["updates_skipped"] == 0.0 and step.row["padding_share"] < 0.5
        found.append(step.row["grad_norm"])
    return found


@pytest.mark.slow
def test_packed_rows_are_rounded_at_random_by_the_steps_own_key():
    """Step 0 twice is one gradient, step 1 another; rounded to nearest, the step makes no difference."""
    first, again, other = packed_gradients([0, 0, 1], "stochastic")
    assert first == again and np.isfinite(first)
    assert first != other and abs(first - other) < 0.2 * first
    nearest = packed_gradients([0, 1], "nearest")
    assert nearest[0] == nearest[1] != first


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
