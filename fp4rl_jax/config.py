"""The root configuration: composes the sections that live beside the code they configure.

`load` merges files and overrides from left to right (later wins), builds, and validates once, before
jax touches a device. Nothing below rank 9 sees the root: the loop takes its parts.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp4rl_jax.configuring import ConfigError, build, merge, parse_override, read_file, to_plain
from fp4rl_jax.configuring import validate as validate_sections
from fp4rl_jax.runs.config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made of; frozen, hashable, equal by value."""

    run: RunConfig = RunConfig()


def load(files: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
    """Builds and validates the configuration of `files` (TOML, or a run's config.json) and `overrides`.

    Args:
        files: paths, merged left to right.
        overrides: `key.path=value` strings, merged after the files, left to right.

    Raises:
        ConfigError: a file that cannot be read, an unknown key or name (with the nearest one), a value
            of the wrong type (with its dotted path), or a configuration that cannot work.
    """
    values: Mapping[str, Any] = {}
    for piece in [*map(read_file, files), *map(parse_override, overrides)]:
        values = merge(values, piece)
    config = build(Config, values)
    validate(config)
    return config


def validate(config: Config) -> None:
    """Refuses a configuration that cannot work, before any device is used.

    Raises:
        ConfigError: names the dotted path and the numbers that do not fit together.
    """
    validate_sections(config, root=config)


def dump(config: Config) -> str:
    """The resolved configuration as JSON: what `--dry_run` prints and a run saves as `config.json`.

    Exact: `load([file holding dump(config)]) == config`.
    """
    return json.dumps(to_plain(config), indent=2) + "\n"


__all__ = ["Config", "ConfigError", "dump", "load", "validate"]
