"""The recipe section: shared names and knobs, overrides of one side, and what is refused."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fp4rl_jax.configuring import ConfigError, RecipeSection, build, sides, to_plain

HEAD = "import dataclasses\n\n@dataclasses.dataclass(frozen=True, kw_only=True)\nclass Config:\n"


@pytest.fixture(autouse=True)
def toy_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three recipes: `bf16` without knobs, `low` with sites and rank, `high` with sites alone."""
    folder = tmp_path / "toy_recipes"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "bf16.py").write_text(HEAD + "    pass\n")
    (folder / "low.py").write_text(HEAD + "    sites: str = 'all'\n    rank: int = 8\n")
    (folder / "high.py").write_text(HEAD + "    sites: str = 'all'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("toy_recipes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sides, "PACKAGE", "toy_recipes")


def _build(values: Mapping[str, Any]) -> RecipeSection:
    return build(RecipeSection, values, path="recipe")


def _names(section: RecipeSection) -> tuple[str, str]:
    return section.trainer.name, section.rollout.name


def test_the_default_is_the_yardstick_on_both_sides() -> None:
    assert _names(_build({})) == ("bf16", "bf16")
    assert _build({}) == RecipeSection()


def test_a_name_sets_both_sides_and_a_sides_own_name_overrides_one() -> None:
    assert _names(_build({"name": "low"})) == ("low", "low")
    assert _names(_build({"name": "low", "trainer": {"name": "bf16"}})) == ("bf16", "low")
    assert _names(_build({"rollout": {"name": "high"}})) == ("bf16", "high")
    assert _names(_build({"trainer": {"name": "low"}, "rollout": {"name": "high"}})) == ("low", "high")


def test_a_shared_knob_goes_to_each_side_that_has_it_and_a_sides_own_wins() -> None:
    section = _build({"name": "low", "sites": "mlp", "rank": 4, "rollout": {"name": "high"}})
    assert (section.trainer.config.sites, section.trainer.config.rank) == ("mlp", 4)
    assert dataclasses.asdict(section.rollout.config) == {"sites": "mlp"}
    section = _build({"name": "low", "rank": 4, "rollout": {"rank": 2}})
    assert (section.trainer.config.rank, section.rollout.config.rank) == (4, 2)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"name": "lwo"}, "recipe.name: unknown toy_recipe 'lwo': did you mean 'low'?"),
        (
            {"trainer": {"name": "hihg"}},
            "recipe.trainer.name: unknown toy_recipe 'hihg': did you mean 'high'?",
        ),
        ({"name": "low", "rnak": 2}, "unknown config key 'recipe.rnak': did you mean 'recipe.rank'?"),
        ({"name": "bf16", "rank": 2}, "unknown config key 'recipe.rank'"),
        ({"name": "low", "rank": "x"}, "recipe.rank: expected int, got str 'x'"),
        ({"name": "low", "rollout": {"rank": "x"}}, "recipe.rollout.rank: expected int, got str 'x'"),
        ({"name": "low", "rollout": "high"}, "recipe.rollout: expected a section with keys, got str 'high'"),
        (
            {"name": "low", "trainer": {"name": "low"}, "rollout": {"name": "high"}},
            "recipe.name has no effect: recipe.trainer.name and recipe.rollout.name are both set",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _build(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "values, plain",
    [
        ({"name": "low", "rank": 4}, {"name": "low", "sites": "all", "rank": 4}),
        (
            {"name": "high", "trainer": {"name": "bf16"}},
            {"trainer": {"name": "bf16"}, "rollout": {"name": "high", "sites": "all"}},
        ),
    ],
)
def test_plain_values_build_an_equal_section(values: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    section = _build(values)
    assert to_plain(section) == plain
    assert _build(plain) == section
    assert hash(_build(plain)) == hash(section)
