"""Every configuration of configs/: its resolved form is the stored one, and ci files take any recipe."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from fp4rl_jax import config

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "configs"


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_goldens", ROOT / "tools" / "write_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
SOURCES = TOOL.sources()
CI = [path for path in sorted((ROOT / "configs" / "ci").glob("*.toml")) if not TOOL.is_sweep(path)]


def test_there_is_one_golden_a_file() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_a_config_resolves_to_its_golden(name: str) -> None:
    resolved = config.load(SOURCES[name])
    wanted = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    assert config.dump(resolved) == wanted, "run tools/write_goldens.py and read the diff"


@pytest.mark.parametrize("name", SOURCES)
def test_a_saved_config_builds_the_same_run(name: str) -> None:
    resolved = config.load(SOURCES[name])
    again = config.load([str(GOLDEN / f"{name}.json")])
    assert again == resolved
    assert hash(again) == hash(resolved)


@pytest.mark.parametrize("path", CI, ids=[path.stem for path in CI])
def test_a_ci_config_sets_the_recipes_name_and_nothing_else_of_it(path: Path) -> None:
    assert set(tomllib.loads(path.read_text())["recipe"]) == {"name"}
