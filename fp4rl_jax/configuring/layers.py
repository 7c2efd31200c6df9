"""Sources merged from left to right, where naming another plug-in begins its section anew.

A plug-in's keys mean something to that plug-in alone: a `clip_high` that was set for GRPO is not DAPO's,
and the `config.json` of a run gives every key of the plug-in that it used. So when a later source names
another one, what earlier sources say of the old one is dropped, and a notice says what that was. Keys of
the source that names the plug-in, and of later ones, are kept; one that it does not have is an error.
"""

import dataclasses
import importlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from fp4rl_jax import plugins
from fp4rl_jax.configuring import sides
from fp4rl_jax.configuring.build import join, to_plain
from fp4rl_jax.configuring.plugin import PACKAGE, default_plugin
from fp4rl_jax.configuring.sides import SIDES, RecipeSection
from fp4rl_jax.configuring.sources import Word, merge


def merge_layers(cls: type, layers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Merges the sources of a configuration of the dataclass `cls`.

    Args:
        cls: its plug-in sections are known by their fields.
        layers: nested mappings; the later wins. All `--set` words of a command line are one.

    Returns:
        One nested mapping, and a line for every section that was begun anew.
    """
    values: dict[str, Any] = {}
    notices: list[str] = []
    for layer in layers:
        for field in dataclasses.fields(cls):
            first, second = values.get(field.name), layer.get(field.name)
            if not isinstance(first, Mapping) or not isinstance(second, Mapping):
                continue
            if typing.get_type_hints(cls)[field.name] is RecipeSection:
                values[field.name] = _recipe(first, second, path=field.name, notices=notices)
            elif PACKAGE in field.metadata:
                old = first.get("name", field.metadata["default_name"])
                values[field.name] = _begun(
                    first, second, old=old, package=field.metadata[PACKAGE], path=field.name, notices=notices
                )
        values = merge(values, layer)
    return values, tuple(notices)


def _recipe(
    first: Mapping[str, Any], second: Mapping[str, Any], *, path: str, notices: list[str]
) -> Mapping[str, Any]:
    """What is left of the recipe section `first` under `second`; a side is a section of its own."""
    both_named = all("name" in _side(first, side) for side in SIDES)
    shared = None if both_named else first.get("name", sides.DEFAULT)
    if "name" in second:
        first = _begun(first, second, old=shared, package=sides.PACKAGE, path=path, notices=notices)
        shared = second["name"]
    left = dict(first)
    named = ["name" in _side(second, side) for side in SIDES]
    if "name" not in second and any(named) and all("name" in _side(merge(first, second), s) for s in SIDES):
        alone = {key: left.pop(key) for key in first if key not in SIDES}  # no side follows it any more
        notices += _notice(path, shared, "a recipe for each side", alone, package=sides.PACKAGE)
    for side in SIDES:
        mine, over = _side(first, side), _side(second, side)
        if mine and over:
            old = mine.get("name", shared)
            left[side] = _begun(
                mine, over, old=old, package=sides.PACKAGE, path=join(path, side), notices=notices
            )
    return left


def _side(section: Mapping[str, Any], side: str) -> Mapping[str, Any]:
    """The side's own part of a recipe section; one of a wrong type is left for `build` to refuse."""
    found = section.get(side)
    return found if isinstance(found, Mapping) else {}


def _begun(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    *,
    old: Any,
    package: str,
    path: str,
    notices: list[str],
) -> Mapping[str, Any]:
    """`first`, or nothing of it where `second` names another plug-in than `old`."""
    if "name" not in second or _text(second["name"]) == _text(old):
        return first
    notices += _notice(path, old, f"{_text(second['name'])!r}", first, package=package, again=second)
    return {}


def _notice(
    path: str,
    old: Any,
    new: str,
    dropped: Mapping[str, Any],
    *,
    package: str,
    again: Mapping[str, Any] | None = None,
) -> list[str]:
    """A line that names what was dropped, less what has the old plug-in's default; none for nothing."""
    known = {} if old is None else _defaults(package, _text(old))
    lost = [
        f"{join(path, key)} = {_shown(value)}"
        for key, value in dropped.items()
        if key != "name" and key not in (again or {}) and not (key in known and known[key] == value)
    ]
    if not lost:
        return []
    was = "" if old is None else f" over {_text(old)!r}"
    return [
        f"{path}: {new}{was} begins the section anew, dropping {', '.join(lost)} of an earlier source; "
        "what should stay is set beside the new name"
    ]


def _defaults(package: str, name: str) -> dict[str, Any]:
    """The plain defaults of a plug-in's Config; {} where there is no such plug-in."""
    if name not in plugins.names(importlib.import_module(package)):
        return {}
    return to_plain(default_plugin(package, name).config)


def _text(value: Any) -> str:
    return value.text if isinstance(value, Word) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_shown(inner)}" for key, inner in value.items()) + "}"
    return value.text if isinstance(value, Word) else repr(value)
