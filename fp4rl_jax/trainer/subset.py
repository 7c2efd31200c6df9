"""Which parameters are trained: a static plan that splits a parameter tree and joins it again.

Layers are stacked ([L, ...] leaves), so the trainable layers must be a suffix: the backward then
stops at the first of them, and the frozen part needs neither gradients nor moments.
"""

import dataclasses
from fnmatch import fnmatchcase

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from fp4rl_jax.arrays import Array, PyTree, unknown_name

Flat = dict[str, Array]
_STACKED = "layers/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset:
    """The plan: the first trainable layer, and the paths trained from there on.

    Attributes:
        first_layer: layers below it are frozen; the number of layers where no layer is trained.
        paths: trained leaves, by path in the stacked tree (`layers/attn/q`, `embed`).
    """

    first_layer: int
    paths: tuple[str, ...]


def plan(shapes: PyTree, patterns: tuple[str, ...], *, num_layers: int) -> Subset:
    """Makes the plan of `patterns` for a parameter tree.

    Args:
        shapes: the nested parameter dict, or its ShapeDtypeStructs.
        patterns: shell-style patterns over paths with the layer spelled out.
        num_layers: L.

    Raises:
        ValueError: a pattern matches nothing, or the selected layers are not a suffix.
    """
    spelled = {p: _spell(p, num_layers) for p in flatten_dict(shapes, sep="/")}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for names in spelled.values() for name in names):
            raise unknown_name("trainable pattern (it matches no parameter)", pattern, spelled)
    hits = {p: [any(fnmatchcase(n, q) for q in patterns) for n in names] for p, names in spelled.items()}
    layered = [i for p, row in hits.items() if p.startswith(_STACKED) for i, hit in enumerate(row) if hit]
    first = min(layered, default=num_layers)
    for path, row in hits.items():
        if path.startswith(_STACKED) and any(row) and not (all(row[first:]) and not any(row[:first])):
            chosen = [i for i, hit in enumerate(row) if hit]
            raise ValueError(
                f"trainable layers must be the last ones: {path} is selected in layers {chosen}, "
                f"expected none or all of {first}..{num_layers - 1}"
            )
    return Subset(first_layer=first, paths=tuple(sorted(p for p, row in hits.items() if any(row))))


def _spell(path: str, num_layers: int) -> list[str]:
    if not path.startswith(_STACKED):
        return [path]
    return [f"{_STACKED}{i}/{path.removeprefix(_STACKED)}" for i in range(num_layers)]


def split(params: PyTree, subset: Subset) -> tuple[Flat, Flat]:
    """Splits a nested tree into (trainable, frozen), both flat by path.

    Stacked trainable leaves keep rows `first_layer:`; their other rows are in the frozen part.
    """
    trainable, frozen = {}, {}
    for path, leaf in flatten_dict(params, sep="/").items():
        if path not in subset.paths:
            frozen[path] = leaf
        elif path.startswith(_STACKED):
            trainable[path] = leaf[subset.first_layer :]
            if subset.first_layer:
                frozen[path] = leaf[: subset.first_layer]
        else:
            trainable[path] = leaf
    return trainable, frozen


def merge(trainable: Flat, frozen: Flat) -> PyTree:
    """Joins the two parts to the nested tree that the model takes; `split`'s inverse.

    Where a stacked leaf's parts differ in dtype, the result has the wider one.
    """
    joined = {**frozen, **trainable}
    for path in trainable.keys() & frozen.keys():
        joined[path] = jnp.concatenate([frozen[path], trainable[path]])
    return unflatten_dict(joined, sep="/")
