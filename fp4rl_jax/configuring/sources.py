"""Where a configuration comes from: TOML or JSON files and `--set` overrides, merged left to right."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4rl_jax.configuring.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Word:
    """A value of `--set`: its text, and the TOML value it parses to (the text itself if none).

    Which of the two is meant depends on the field, so the choice is left to the builder: a string
    field takes the text (`--set run.name=3` names a run "3"), every other field the value.
    """

    text: str
    value: Any


def read_file(path: str) -> dict[str, Any]:
    """Reads a TOML file, or the JSON that a run saved as its `config.json`.

    Raises:
        ConfigError: the file is missing or is not valid TOML/JSON; names the file.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config file {path!r}: {error.strerror}") from error
    try:
        return json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if file.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: not valid {kind}: {error}") from error


def parse_override(text: str) -> dict[str, Any]:
    """Turns `a.b=c` into `{"a": {"b": Word(c)}}`; `c` is a TOML value or a bare word.

    Raises:
        ConfigError: there is no `=`, or the key is not a dotted path of names.
    """
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"--set {text!r}: expected key.path=value, such as trainer.optim.lr=5e-7")
    nested: Any = _parse_word(value.strip())
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def _parse_word(text: str) -> Word:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return Word(text, text)
    # Text with a line break could smuggle in further keys; then it is no TOML value but a word.
    return Word(text, parsed["value"] if len(parsed) == 1 else text)


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The two nested mappings as one; where both give a key, the second wins. Neither is changed."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(old, value) if both else value  # pyright: ignore[reportArgumentType]
    return merged
