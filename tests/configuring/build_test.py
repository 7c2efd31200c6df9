"""Typed building: what is accepted, what is refused, and what the refusal says."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from fp4rl_jax.configuring import (
    ConfigError,
    build,
    merge,
    parse_override,
    plugin_section,
    to_plain,
    validate,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    lr: float = 1e-3
    steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)
    patterns: tuple[str, ...] = ("*",)

    def validate(self, root: "Root") -> None:
        if self.steps > root.limit:
            raise ValueError(f"steps {self.steps} exceed the limit {root.limit}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Root:
    name: str = "run"
    limit: int = 100
    nudge: bool = False
    order: Literal["free", "fixed"] = "free"
    clip: float | None = None
    tag: str | None = None
    size: int | str = 0
    pairs: tuple[tuple[str, int], ...] = ()
    optim: Optim = Optim()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    path: str


def _set(*texts: str) -> Any:
    values: dict[str, Any] = {}
    for text in texts:
        values = merge(values, parse_override(text))
    return build(Root, values)


@pytest.mark.parametrize(
    "text, field, value",
    [
        ("name=qat_w4a4", "name", "qat_w4a4"),
        ('name="qat w4a4"', "name", "qat w4a4"),
        ("name=123", "name", "123"),
        ("name=true", "name", "true"),
        ("name=2026-01-31", "name", "2026-01-31"),
        ("name=a=b", "name", "a=b"),
        ("name=", "name", ""),
        ("limit=1_000", "limit", 1000),
        ("nudge=true", "nudge", True),
        ("order=fixed", "order", "fixed"),
        ("clip=2", "clip", 2.0),
        ("clip=none", "clip", None),
        ("clip=1e-30", "clip", 1e-30),
        ("tag=none", "tag", None),
        ("tag=12", "tag", "12"),
        ("size=3", "size", 3),
        ("size=large", "size", "large"),
        ('pairs=[["a", 1], ["b", 2]]', "pairs", (("a", 1), ("b", 2))),
        ("pairs=[]", "pairs", ()),
    ],
)
def test_an_override_takes_the_type_of_its_field(text: str, field: str, value: object) -> None:
    found = getattr(_set(text), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("limit=2.0", "limit: expected int, got '2.0'"),
        ("limit=true", "limit: expected int, got 'true'"),
        ("limit=many", "limit: expected int, got 'many'"),
        ("nudge=1", "nudge: expected bool, got '1'"),
        ("optim.lr=fast", "optim.lr: expected float, got 'fast'"),
        ("optim.lr=true", "optim.lr: expected float, got 'true'"),
        ("optim.betas=[0.9]", "optim.betas: expected a list [float, float], got 1 values"),
        ("optim.patterns=attn", "optim.patterns: expected a list of str, got 'attn'"),
        ("optim.patterns=['a', 1]", "optim.patterns[1]: expected str, got int 1"),
        ("optim=3", "optim: expected a section with keys"),
        ("clip=high", "clip: expected float or none, got 'high'"),
        ("order=fixd", "order: unknown value 'fixd': did you mean 'fixed'?"),
        ("optim.rl=1", "unknown config key 'optim.rl': did you mean 'optim.lr'?"),
        ("optm.lr=1", "unknown config key 'optm': did you mean 'optim'?"),
        ("name.first=1", "name: expected str, got dict"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_dotted_path(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _set(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["name", "=3", "a..b=1", "a b=1", "1a=2"])
def test_a_malformed_override_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected key\.path=value"):
        parse_override(text)


def test_a_value_with_a_line_break_cannot_add_keys() -> None:
    assert _set("name=1\nlimit = 5").name == "1\nlimit = 5"
    assert _set("name=1\nlimit = 5").limit == 100


def test_later_values_win_and_sections_merge() -> None:
    config = _set("optim.lr=1", "optim.steps=7", "optim.lr=2")
    assert config.optim == Optim(lr=2.0, steps=7)
    first = {"optim": {"lr": 1.0}}
    assert merge(first, {"optim": {"steps": 3}}) == {"optim": {"lr": 1.0, "steps": 3}}
    assert first == {"optim": {"lr": 1.0}}


def test_two_builds_are_equal_hash_equal_and_survive_the_way_to_json_and_back() -> None:
    texts = ("optim.patterns=['layers/2*', 'final_norm']", "clip=0.5", "order=fixed", "pairs=[['a', 1]]")
    one, two = _set(*texts), _set(*texts)
    assert one == two
    assert hash(one) == hash(two)
    assert build(Root, to_plain(one)) == one
    assert build(Root, to_plain(Root())) == Root()


def test_a_missing_required_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^path: required, and not given \(expected str\)$"):
        build(Needs, {})


def test_validate_reports_the_section_and_the_numbers() -> None:
    config = _set("optim.steps=101")
    with pytest.raises(ConfigError, match=r"^optim: steps 101 exceed the limit 100$"):
        validate(config, root=config)
    config = _set("optim.steps=100")
    validate(config, root=config)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with two plug-ins, `plain` and `fancy`; returns its name."""
    folder = tmp_path / "toy_plugins"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    head = "import dataclasses\n\n@dataclasses.dataclass(frozen=True, kw_only=True)\nclass Config:\n"
    (folder / "plain.py").write_text(head + "    pass\n")
    (folder / "fancy.py").write_text(head + "    rank: int = 8\n    sites: tuple[str, ...] = ('a',)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("toy_plugins")]:
        monkeypatch.delitem(sys.modules, name)
    return "toy_plugins"


def test_a_plugin_section_is_typed_by_the_files_own_config(toys: str) -> None:
    section: Any = dataclasses.make_dataclass(
        "Section", [("toy", Any, plugin_section(toys, default="plain"))], frozen=True, kw_only=True
    )
    assert build(section, {}).toy.name == "plain"
    built = build(section, {"toy": {"name": "fancy", "rank": 4}})
    assert (built.toy.name, built.toy.config.rank, built.toy.config.sites) == ("fancy", 4, ("a",))
    assert built.toy.module.Config is type(built.toy.config)
    assert built == build(section, {"toy": {"name": "fancy", "rank": 4}})
    assert hash(built) == hash(build(section, {"toy": {"name": "fancy", "rank": 4}}))
    assert to_plain(built) == {"toy": {"name": "fancy", "rank": 4, "sites": ["a"]}}
    assert build(section, to_plain(built)) == built


@pytest.mark.parametrize(
    "values, message",
    [
        ({"name": "fancey"}, "toy.name: unknown toy_plugin 'fancey': did you mean 'fancy'?"),
        ({"name": "fancy", "rnak": 1}, "unknown config key 'toy.rnak': did you mean 'toy.rank'?"),
        ({"name": "plain", "rank": 1}, "unknown config key 'toy.rank'"),
        ({"name": "fancy", "rank": "1"}, "toy.rank: expected int, got str '1'"),
        ({"name": 3}, "toy.name: expected str, got int 3"),
        ("fancy", "toy: expected a section with keys, got str 'fancy'"),
    ],
)
def test_a_plugin_section_refuses_with_the_nearest_name(toys: str, values: object, message: str) -> None:
    section: Any = dataclasses.make_dataclass(
        "Section", [("toy", Any, plugin_section(toys, default="plain"))], frozen=True, kw_only=True
    )
    with pytest.raises(ConfigError) as caught:
        build(section, {"toy": values})
    assert message in str(caught.value)
