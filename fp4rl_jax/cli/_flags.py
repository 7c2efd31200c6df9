"""What subcommands share: their own flag sets, and a configuration from `--config` and `--set`.

    fp4rl train --config configs/base/tiny.toml --config configs/recipes/qat_w4a4.toml \
        --set trainer.optim.lr=5e-7 --dry_run

Each subcommand makes a fresh `FlagValues`, so no flag is global and none leaks between subcommands.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

if TYPE_CHECKING:
    from fp4rl_jax import config


class Done(Exception):
    """The command line was answered while it was parsed (help, a mistake); `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def config_flags() -> flags.FlagValues:
    """A flag set with `--config` and `--set` (both repeatable) and `--dry_run`."""
    values = flags.FlagValues()
    flags.DEFINE_multi_string(
        "config", [], "a TOML file, or a run's config.json; repeatable, later wins", flag_values=values
    )
    flags.DEFINE_multi_string(
        "set", [], "key.path=value over the files; repeatable, later wins", flag_values=values
    )
    flags.DEFINE_bool(
        "dry_run", False, "print the resolved configuration as JSON and stop", flag_values=values
    )
    return values


def parse(
    values: flags.FlagValues, argv: Sequence[str], *, name: str, summary: str, words: str = ""
) -> list[str]:
    """Parses `argv` into `values` and returns the words that are not flags.

    Args:
        name, summary: of the subcommand, for its help.
        words: what it takes beside flags, as the usage line names them.

    Raises:
        Done: `--help` was asked for (code 0), or a flag is unknown or malformed (code 2).
    """
    if {"--help", "-h", "-help"} & set(argv):
        usage = " ".join(word for word in ("usage: fp4rl", name, words, "[flags]") if word)
        print(f"fp4rl {name}: {summary}\n\n{usage}\n{values.get_help(include_special_flags=False)}")
        raise Done(0)
    try:
        return values([f"fp4rl {name}", *argv], known_only=False)[1:]
    except flags.Error as error:
        unknown = isinstance(error, flags.UnrecognizedFlagError) and "set" in values
        hint = "; a configuration's key is given as --set key.path=value" if unknown else ""
        print(f"fp4rl {name}: {error}{hint}", file=sys.stderr)
        raise Done(2) from error


def get[T](values: flags.FlagValues, name: str, kind: type[T]) -> T:
    """The value of flag `name`, which was defined as a `kind` with a default."""
    found = values[name].value
    if not isinstance(found, kind):
        raise TypeError(f"flag {name} holds {found!r}, expected {kind.__name__}")
    return found


def require_sections(values: flags.FlagValues, *wanted: tuple[str, ...]) -> None:
    """`require_named` of what `--config` and `--set` give."""
    require_named(values["config"].value or (), values["set"].value or (), *wanted)


def require_named(files: Sequence[str], overrides: Sequence[str], *wanted: tuple[str, ...]) -> None:
    """Refuses to train something that nobody named: one section of each of `wanted` has to be set.

    Raises:
        ConfigError: neither a file nor an override says anything in them.
    """
    from fp4rl_jax import config

    given = config.sections(files, overrides)
    missing = [" or ".join(f"[{name}]" for name in names) for names in wanted if not given & set(names)]
    if missing:
        raise config.ConfigError(
            f"nothing sets {', nor '.join(missing)}: give a configuration that does (e.g. --config "
            "configs/demo.toml), or --set model.path=models/smollm2 --set task.name=arithmetic"
        )


def output_file(values: flags.FlagValues, name: str) -> Path | None:
    """The file that flag `name` asks to write, or None; refused now and not when the work is done.

    Raises:
        ValueError: it is a folder, or its folder is not there or not writable.
    """
    if values[name].value is None:
        return None
    path = Path(get(values, name, str))
    if path.is_dir():
        raise ValueError(f"--{name} {path} is a folder, expected a file to write")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--{name} {path}: no folder {path.parent} that can be written")
    return path


def load_config(values: flags.FlagValues) -> "config.Config":
    """The configuration that `--config` and `--set` give, built and validated.

    Raises:
        ConfigError: it is wrong.
        Done: `--dry_run` printed it (code 0).
    """
    from fp4rl_jax import config  # here, so that subcommands without a configuration start at once

    resolved = config.load(values["config"].value or (), values["set"].value or ())
    if values["dry_run"].value:
        print(config.dump(resolved), end="")
        raise Done(0)
    return resolved
