"""Builds frozen dataclasses from nested mappings, typed field by field, and turns them back.

Accepted field types: bool, int, float, str, None, Literal, unions, tuple, nested dataclasses and
`Plugin` sections. An int is accepted where a float is wanted, a list where a tuple is, and the word
`none` where the field may be None (TOML has no null). Everything else that does not fit is an error
that names the dotted path, the value and the type.
"""

import contextlib
import dataclasses
import functools
import importlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union

from fp4rl_jax import plugins
from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.configuring.errors import ConfigError
from fp4rl_jax.configuring.plugin import PACKAGE, Plugin
from fp4rl_jax.configuring.sources import Word


def build(cls: type, values: Mapping[str, Any], *, path: str = "") -> Any:
    """An instance of the dataclass `cls` from `values`.

    A class with a classmethod `from_values(values, *, path)` builds itself; every other dataclass is
    built field by field. Two builds of equal values are equal and hash equal.

    Raises:
        ConfigError: an unknown key (with the nearest one), a missing value, or a type that does not
            fit; always with the dotted path.
    """
    values = section(values, path=path)
    if hasattr(cls, "from_values"):
        return cls.from_values(values, path=path)  # pyright: ignore[reportAttributeAccessIssue]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in values:
        if key not in fields:
            raise ConfigError(
                str(unknown_name("config key", join(path, key), [join(path, f) for f in fields]))
            )
    hints = typing.get_type_hints(cls)
    built = {}
    for name, field in fields.items():
        if name in values:
            built[name] = _build_field(field, hints[name], values[name], path=join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"{join(path, name)}: required, and not given (expected {describe(hints[name])})"
            )
    try:
        return cls(**built)
    except ValueError as error:  # a dataclass that refuses its own values in __post_init__
        raise located(path, error) from error


def _build_field(field: dataclasses.Field[Any], hint: Any, value: Any, *, path: str) -> Any:
    if PACKAGE in field.metadata:
        return build_plugin(field.metadata[PACKAGE], value, path=path, default=field.metadata["default_name"])
    return coerce(hint, value, path=path)


def build_plugin(package: str, values: Any, *, path: str, default: str | None = None) -> Plugin:
    """A `Plugin` from a section: `name` chooses the file, every other key is typed by its `Config`."""
    values = section(values, path=path)
    name = coerce(str, values.get("name", default), path=join(path, "name"))
    folder = importlib.import_module(package)
    if name not in plugins.names(folder):
        kind = package.rsplit(".", 1)[-1].rstrip("s")
        raise ConfigError(f"{join(path, 'name')}: {unknown_name(kind, name, plugins.names(folder))}")
    knobs = {key: value for key, value in values.items() if key != "name"}
    return Plugin(package, name, build(plugins.load(folder, name).Config, knobs, path=path))


def coerce(hint: Any, value: Any, *, path: str) -> Any:
    """`value` as the type `hint`, or a ConfigError with the dotted path."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path=path)
    if origin in (Union, types.UnionType):
        return _coerce_union(hint, value, path=path)
    if hint in (None, types.NoneType):
        if value is None or _plain(value, hint=str) == "none":
            return None
    elif origin is Literal:
        return _coerce_literal(hint, value, path=path)
    elif origin is tuple:
        return _coerce_tuple(hint, value, path=path)
    else:
        found = _plain(value, hint=hint)
        if hint is float and type(found) is int:
            return float(found)
        if type(found) is hint:
            return found
    raise ConfigError(f"{path}: expected {describe(hint)}, got {_show(value)}")


def _coerce_union(hint: Any, value: Any, *, path: str) -> Any:
    """The first member that takes the value; None and numbers are tried before strings."""
    members = sorted(typing.get_args(hint), key=lambda member: (member is not types.NoneType, member is str))
    exact = [member for member in members if type(_plain(value, hint=member)) is member]
    sections = [member for member in members if dataclasses.is_dataclass(member)]
    if isinstance(value, Mapping) and len(sections) == 1:
        return coerce(sections[0], value, path=path)  # for an error that names the key inside
    for member in [*[m for m in members if m is types.NoneType], *exact, *members]:
        try:
            return coerce(member, value, path=path)
        except ConfigError:
            continue
    raise ConfigError(f"{path}: expected {describe(hint)}, got {_show(value)}")


def _coerce_literal(hint: Any, value: Any, *, path: str) -> Any:
    choices = typing.get_args(hint)
    for choice in choices:
        found = _plain(value, hint=type(choice))
        if type(found) is type(choice) and found == choice:
            return choice
    found = _plain(value, hint=str)
    if isinstance(found, str) and all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"{path}: {unknown_name('value', found, choices)}")
    raise ConfigError(f"{path}: expected {describe(hint)}, got {_show(value)}")


def _coerce_tuple(hint: Any, value: Any, *, path: str) -> tuple[Any, ...]:
    items = value.value if isinstance(value, Word) else value
    kinds = typing.get_args(hint)
    if not isinstance(items, list | tuple):
        raise ConfigError(f"{path}: expected {describe(hint)}, got {_show(value)}")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(items)
    if len(kinds) != len(items):
        raise ConfigError(f"{path}: expected {describe(hint)}, got {len(items)} values: {_show(value)}")
    pairs = enumerate(zip(kinds, items, strict=True))
    return tuple(coerce(kind, item, path=f"{path}[{index}]") for index, (kind, item) in pairs)


def _plain(value: Any, *, hint: Any) -> Any:
    """What a `--set` word means for a field of type `hint`; every other value as it is."""
    if not isinstance(value, Word):
        return value
    wants_text = hint is str and not isinstance(value.value, str)
    return value.text if wants_text else value.value


def _show(value: Any) -> str:
    if isinstance(value, Word):
        return repr(value.text)
    return f"{type(value).__name__} {value!r}"


def describe(hint: Any) -> str:
    """A type as a reader would say it: `float`, `one of 'a', 'b'`, `list of int`, `str or none`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, types.NoneType):
        return "none"
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in arguments)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"a list of {describe(arguments[0])}"
        return "a list [" + ", ".join(describe(member) for member in arguments) + "]"
    if dataclasses.is_dataclass(hint):
        return "a section"
    return getattr(hint, "__name__", str(hint))


def section(values: Any, *, path: str) -> Mapping[str, Any]:
    """`values` if it is a mapping; ConfigError naming the path if a plain value stands in its place."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a section with keys, got {_show(values)}")
    return values


def located(path: str, error: ValueError) -> ConfigError:
    """`error` as a ConfigError that begins with `path`, unless its text already does."""
    text = str(error)
    known = not path or text.startswith(f"{path}.")
    return ConfigError(text if known else f"{path}: {text}")


def join(path: str, key: str) -> str:
    """The dotted path of `key` inside the section `path` ("" for the root)."""
    return f"{path}.{key}" if path else key


@functools.singledispatch
def to_plain(value: Any) -> Any:
    """`value` as nested dicts, lists and scalars: what JSON holds and `build` takes back.

    A dataclass with a method `to_values` (the counterpart of `from_values`) gives its own.

    Raises:
        TypeError: a value of a type that a configuration cannot hold.
    """
    if hasattr(value, "to_values"):
        return value.to_values()
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a configuration cannot hold {value!r} of type {type(value).__name__}")


@to_plain.register(tuple)
def _(value: tuple[Any, ...]) -> list[Any]:
    return [to_plain(item) for item in value]


@to_plain.register
def _(value: Plugin) -> dict[str, Any]:
    return {"name": value.name, **to_plain(value.config)}


def validate(section: Any, *, root: Any, path: str = "") -> None:
    """Calls `validate(root)` of every dataclass inside `section`, depth first, before any device use.

    Raises:
        ConfigError: what a section's `validate` raised as ValueError, with the section's dotted path.
    """
    if isinstance(section, Plugin):
        return validate(section.config, root=root, path=path)
    if not dataclasses.is_dataclass(section):
        return
    for field in dataclasses.fields(section):
        validate(getattr(section, field.name), root=root, path=join(path, field.name))
    if section is root or not hasattr(section, "validate"):
        return
    with checking(path):
        section.validate(root)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def checking(path: str) -> Iterator[None]:
    """Turns a ValueError raised inside into a ConfigError that names the section `path`."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise located(path, error) from error
