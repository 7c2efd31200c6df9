"""A run's programs are compiled before its first step, each once, and are those that the steps call."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from fp4rl_jax.cli import _job
from fp4rl_jax.cli.train import train
from fp4rl_jax.config import load
from fp4rl_jax.loop import Job
from fp4rl_jax.runs import exit_codes, give_back

ROOT = Path(__file__).parents[2]
COUNTED = re.compile(r"Finished XLA compilation of jit\((\w+)\)")


def config(folder: Path, *more: str):
    words = [f"run.root={folder}", "run.tensorboard=off", "run.progress=off", "loop.steps=1", *more]
    return load([str(ROOT / "configs/ci/grpo.toml")], words)


@pytest.fixture
def logged() -> Iterator[None]:
    """Compilations are logged in every thread, which `jax.log_compiles` does for its own alone."""
    jax.clear_caches()  # of earlier tests
    jax.config.update("jax_log_compiles", True)
    yield
    jax.config.update("jax_log_compiles", False)


@pytest.mark.usefixtures("logged")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(["eval.problems=2"], {"update": 1, "_sample": 2, "score_batch": 0}, id="one_update"),
        pytest.param(
            ["trainer.updates_per_rollout=2", "algorithm.name=reinforce_pp"],
            {"update": 2, "_sample": 1, "score_batch": 1},
            id="two_updates",
        ),
        pytest.param(
            ["recipe.name=trace", "correction.name=score_centering", "eval.problems=2"],
            {"update": 1, "_sample": 2, "score_batch": 0},
            id="guided_with_candidates",
        ),
        pytest.param(
            ["recipe.name=quads", "algorithm.kl_coef=0.01"],
            {"update": 1, "_sample": 1, "score_batch": 1},
            id="calibrated_with_a_reference",
        ),
    ],
)
def test_every_program_is_compiled_once_and_before_the_step(
    tmp_path, caplog, monkeypatch, settings, expected
):
    seen: list[Counter[str]] = []

    def counted() -> Counter[str]:
        return Counter(name for text in caplog.messages for name in COUNTED.findall(text))

    def job(*args) -> Job:
        made = build(*args)

        def step(*given):
            seen.append(counted())
            return made.step(*given)

        return Job(**{**vars(made), "step": step})

    build = _job.job
    monkeypatch.setattr(_job, "job", job)
    with caplog.at_level(logging.WARNING, "jax"):
        assert train(config(tmp_path, *settings)) == exit_codes.OK
    before, after = seen[0], counted()
    assert {name: after[name] for name in expected} == expected
    late = {"score_batch": 1} if "algorithm.kl_coef=0.01" in settings else {}  # the reference's
    for name, count in expected.items():
        assert before[name] == count - late.get(name, 0), name


def test_giving_memory_back_leaves_values_as_they_are():
    x = jax.numpy.arange(2**20, dtype=jax.numpy.float32)
    total = float(x.sum())
    give_back()
    assert float(x.sum()) == total
