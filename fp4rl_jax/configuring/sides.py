"""The `recipe` section: one plug-in for the trainer and one for the rollout, set together or apart."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Self

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.configuring.build import build_plugin, coerce, join, section, to_plain
from fp4rl_jax.configuring.errors import ConfigError
from fp4rl_jax.configuring.plugin import Plugin, default_plugin

PACKAGE = "fp4rl_jax.recipes"
SIDES = ("trainer", "rollout")
#: The yardstick: what a side follows when no recipe is named.
DEFAULT = "bf16"


def _default() -> Plugin:
    return default_plugin(PACKAGE, DEFAULT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeSection:
    """Which recipe each side follows; any pair is legal.

    `name` and further keys in `[recipe]` go to both sides: a key goes to each side whose recipe has
    that field. `[recipe.trainer]` and `[recipe.rollout]` win for their side.

    Attributes:
        trainer: the recipe whose `trainer(config)` gives the trainer's spec.
        rollout: the recipe whose `rollout(config)` gives the sampler's spec.
    """

    trainer: Plugin = dataclasses.field(default_factory=_default)
    rollout: Plugin = dataclasses.field(default_factory=_default)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, path: str) -> Self:
        """Builds both sides from the section; ConfigError as `configuring.build`."""
        own = {side: section(values.get(side, {}), path=join(path, side)) for side in SIDES}
        if "name" in values and all("name" in mine for mine in own.values()):
            raise ConfigError(
                f"{path}.name has no effect: {path}.trainer.name and {path}.rollout.name are both set"
            )
        named = {side: _named(values, own[side], path=join(path, side)) for side in SIDES}
        shared = {key: value for key, value in values.items() if key not in ("name", *SIDES)}
        known = {side: _fields(name, path=join(path, side)) for side, name in named.items()}
        _check_shared(shared, known, path=path)
        built = {}
        for side in SIDES:
            mine = {key: value for key, value in shared.items() if key in known[side]}
            built[side] = build_plugin(
                PACKAGE, {**mine, **own[side], "name": named[side]}, path=join(path, side)
            )
        return cls(**built)

    def to_values(self) -> dict[str, Any]:
        """The section as `from_values` takes it; written once where both sides are the same."""
        if self.trainer == self.rollout:
            return to_plain(self.trainer)
        return {side: to_plain(getattr(self, side)) for side in SIDES}


def _named(shared: Mapping[str, Any], own: Mapping[str, Any], *, path: str) -> str:
    """The recipe's name for one side: its own, else the shared one, else the default."""
    given, where = (
        (own["name"], path) if "name" in own else (shared.get("name", DEFAULT), path.rpartition(".")[0])
    )
    return build_plugin(PACKAGE, {"name": given}, path=where).name


def _fields(name: str, *, path: str) -> dict[str, Any]:
    """{field: type} of the `Config` of the recipe `name`."""
    return typing.get_type_hints(type(build_plugin(PACKAGE, {"name": name}, path=path).config))


def _check_shared(shared: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]], *, path: str) -> None:
    """Refuses a shared key that no side knows, or whose value does not fit a side that does."""
    union = sorted({join(path, field) for fields in known.values() for field in fields})
    for key, value in shared.items():
        if join(path, key) not in union:
            raise ConfigError(str(unknown_name("config key", join(path, key), union)))
        for fields in known.values():
            if key in fields:
                coerce(fields[key], value, path=join(path, key))
