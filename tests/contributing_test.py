"""The worked examples of CONTRIBUTING.md, run as they stand there."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fp4rl_jax
from fp4rl_jax import config, formats, models, plugins, recipes, tasks

ROOT = Path(__file__).parent.parent
EXAMPLES = dict(
    re.findall(r"```python\n# (\S+\.py)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
)


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adds an example's file to its folder for the length of a test."""

    def adder(package: ModuleType, name: str) -> ModuleType:
        folder = package.__name__.replace(".", "/")
        (tmp_path / f"{name}.py").write_text(EXAMPLES[f"{folder}/{name}.py"])
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        module = plugins.load(package, name)
        monkeypatch.delitem(sys.modules, module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return adder


def test_the_recipe_quantizes_weights_on_both_sides_and_activations_on_one(add) -> None:
    add(recipes, "w4a8")
    built = config.load([], ["recipe.name=w4a8", "recipe.scale_rule=even"])
    sites = models.sites(models.ModelConfig())
    module = built.recipe.trainer.module
    for site in sites:
        trainer = module.trainer(built.recipe.trainer.config).resolve(sites)[site]
        rollout = module.rollout(built.recipe.rollout.config).resolve(sites)[site]
        assert trainer.weight == rollout.weight
        assert trainer.weight.fmt == formats.make("mxfp4", scale_rule="even")
        assert (trainer.act, rollout.act.fmt.name) == (None, "fp8_e4m3")


def test_the_task_rewards_the_word_backwards(add) -> None:
    add(tasks, "reverse")
    section = config.load([], ["task.name=reverse", "task.eval_size=3"]).task
    task = section.module.build(section.config)
    assert (len(task.train), len(task.eval)) == (5, 3)
    item = task.eval[0]
    assert item.answer == "enots"
    assert task.reward(item, " Enots\n").value == 1.0
    assert task.reward(item, "stone").value == 0.0


def test_the_callable_task_takes_functions_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_task.py"
    path.write_text(EXAMPLES["my_task.py"])
    section = config.load(
        [],
        [
            "task.name=callable",
            f"task.train={path}:rows",
            f"task.reward={path}:reward",
            f"task.eval={path}:held_out_rows",
        ],
    ).task
    task = section.module.build(section.config)
    assert (len(task.train), len(task.eval)) == (4, 2)
    item = task.train[0]
    assert (task.reward(item, item.answer).value, task.reward(item, "").value) == (1.0, 0.0)
    assert json.dumps(dataclasses.asdict(section.config))


def test_the_format_rounds_to_integers_and_back(add) -> None:
    add(formats, "int4")
    x = np.concatenate([np.arange(-7, 8), [0.5, 1.5, -2.5], np.zeros(14)]).astype(np.float32)
    q = fp4rl_jax.quantize(x, "int4")
    assert q.bits_per_value == 4.25
    expected = np.concatenate([np.arange(-7, 8), [0, 2, -2], np.zeros(14)])
    np.testing.assert_array_equal(np.asarray(fp4rl_jax.dequantize(q)), expected)
    scaled = fp4rl_jax.dequantize(fp4rl_jax.quantize(x * 2.0**-20, "int4"))
    np.testing.assert_array_equal(np.asarray(scaled), expected * 2.0**-20)
