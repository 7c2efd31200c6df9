"""What a second, sparse pass adds to a quantized activation: one file a selection, and the pass itself.

`make("blocks", ratio=0.25)` gives a selection; `Residual(selection=..., quantizer=...)` the pass.
The files are the registry: a selection's name is its file's.
"""

import dataclasses
import sys

from fp4rl_jax import plugins
from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.quantizers.residual._base import Selection
from fp4rl_jax.quantizers.residual._clamp import OutlierClamp
from fp4rl_jax.quantizers.residual._columns import ChannelStats, Columns, channel_stats
from fp4rl_jax.quantizers.residual._pass import Correction, Residual, placed

__all__ = [
    "ChannelStats",
    "Columns",
    "Correction",
    "OutlierClamp",
    "Residual",
    "Selection",
    "channel_stats",
    "make",
    "names",
    "placed",
]


def names() -> tuple[str, ...]:
    """The names of all selections: the files of this folder."""
    return plugins.names(sys.modules[__name__])


def make(name: str, **options: object) -> Selection:
    """A selection by name, with options replaced.

    Args:
        name: one of `names()`.
        **options: the selection's own fields; see its class.

    Raises:
        ValueError: unknown selection, option or option value; the message gives the nearest.
    """
    base: Selection = plugins.load(sys.modules[__name__], name).SELECTION
    known = tuple(field.name for field in dataclasses.fields(base))
    for option in options:
        if option not in known:
            raise unknown_name(f"option of selection {name}", option, known)
    return dataclasses.replace(base, **options)
