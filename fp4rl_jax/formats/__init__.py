"""Number formats, one file each: codes, scale levels, `encode` (the only narrowing), `decode`.

`make("nvfp4", outer="row")` gives a format object; nothing outside a format's own file knows its
name. See docs/FORMATS.md for what each one stores and how to add another.
"""

import dataclasses
import itertools
import sys

from fp4rl_jax import plugins
from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.formats import _bits as bits
from fp4rl_jax.formats._base import Format, RoundingFn, choices, to_nearest
from fp4rl_jax.formats._grid import E2M1, Bracket, Grid, GridBracket

__all__ = [
    "E2M1",
    "Bracket",
    "Format",
    "Grid",
    "GridBracket",
    "RoundingFn",
    "bits",
    "choices",
    "make",
    "modes",
    "names",
    "to_nearest",
    "variations",
]


def names() -> tuple[str, ...]:
    """The names of all formats: the files of this folder."""
    return plugins.names(sys.modules[__name__])


def make(fmt: str | Format, **options: object) -> Format:
    """A format by name, or a format object, with options replaced.

    Args:
        fmt: a name from `names()` or a Format.
        **options: the format's own fields; see its class.

    Raises:
        ValueError: unknown format, option or option value; the message gives the nearest.
    """
    base = fmt if isinstance(fmt, Format) else plugins.load(sys.modules[__name__], fmt).FORMAT
    known = tuple(field.name for field in dataclasses.fields(base))
    for option in options:
        if option not in known:
            raise unknown_name(f"option of format {base.name}", option, known)
    return dataclasses.replace(base, **options) if options else base


def variations(name: str) -> tuple[Format, ...]:
    """The format with its defaults, and with each option in turn set to each other value."""
    base = make(name)
    changes = [
        {field: value}
        for field, allowed in _allowed(base).items()
        for value in allowed
        if value != getattr(base, field)
    ]
    return (base, *(make(base, **change) for change in changes))


def modes(name: str) -> tuple[Format, ...]:
    """The format in every combination of its options' values."""
    base = make(name)
    allowed = _allowed(base)
    combinations = itertools.product(*allowed.values())
    return tuple(make(base, **dict(zip(allowed, values, strict=True))) for values in combinations)


def _allowed(fmt: Format) -> dict[str, tuple[object, ...]]:
    return {field.name: field.metadata.get("choices", ()) for field in dataclasses.fields(fmt)}
