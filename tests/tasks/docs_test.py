"""docs/TASKS.md and docs/ALGORITHMS.md: the worked example runs, and no setting is missing."""

import dataclasses
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from fp4rl_jax import algorithms, corrections, plugins, tasks
from fp4rl_jax.tasks import callable as task_callable

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (DOCS / "TASKS.md").read_text(), flags=re.DOTALL)
# Code blocks begin with a comment that names their file; JSON has no comments.
FILES = {"prompts.jsonl" if kind == "json" else text.split()[1]: text for kind, text in BLOCKS}


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_worked_example_runs_as_it_stands(here, capsys):
    runpy.run_path("try_it.py")
    printed = capsys.readouterr().out
    assert re.match(r"\d to train on, [1-5] held out\n", printed) and "value=1.0" in printed


def test_the_worked_configuration_is_the_tried_one(here):
    settings = tomllib.loads((here / "my_task.toml").read_text())["task"]
    assert settings.pop("name") == "callable"
    task = task_callable.build(task_callable.Config(**settings))
    item = task.eval[0]
    wordy = task.reward(item, f"I believe that it is {item.answer}.")
    assert wordy.value == 0.8 and not wordy.correct and dict(wordy.parts) == {"right": 1.0, "brief": 0.0}


@pytest.mark.parametrize(
    "page, package", [("TASKS.md", tasks), ("ALGORITHMS.md", algorithms), ("ALGORITHMS.md", corrections)]
)
def test_every_plugin_and_setting_is_documented(page, package):
    text = (DOCS / page).read_text()
    for name in plugins.names(package):
        assert f"`{name}`" in text, name
        for field in dataclasses.fields(plugins.load(package, name).Config):
            assert re.search(rf"`(\w+\.)?{field.name}\b", text), f"{name}.{field.name}"
