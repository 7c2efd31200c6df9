"""Type aliases, the axis alphabet and the few checks that every layer shares.

Rank 0: imports nothing of the project. One letter has one meaning everywhere, in einsum
strings, in `# [B, T, D]` comments and in `chex.Dimensions`:

    B sequences   T time          S cached time     D model width   H query heads
    K kv heads    G heads per K   C head dim        F ffn width     V vocabulary
    E experts     L layers        P prompts (B = P * group_size)
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any

#: Floating dtypes that a configuration may name.
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Builds the error for a name that does not exist, with the nearest one that does.

    Args:
        kind: what the name stands for, as a reader would say it ("format", "config key").
        name: the name that was given.
        known: the names that exist.

    Returns:
        A ValueError to raise, e.g. `unknown format 'nvpf4': did you mean 'nvfp4'? (known: ...)`.
    """
    choices = sorted(known)
    near = get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f": did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} (known: {', '.join(choices) or 'none'})")


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns `name` if it is among `known`; raises the nearest-name ValueError if not."""
    choices = tuple(known)
    if name not in choices:
        raise unknown_name(kind, name, choices)
    return name


def dtype_of(name: str) -> Any:
    """The jnp dtype of a configured dtype name; ValueError with the nearest name otherwise."""
    return DTYPES[check_name("dtype", name, DTYPES)]


def as_rows(x: Array) -> Array:
    """[..., n] as its rows [M, n], also where n is 0 (a format without scale bytes)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
