"""Which parameters are trained: a static plan that splits a parameter tree and joins it again.

Layers are stacked ([L, ...] leaves), so the trainable layers must be a suffix: the backward then
stops at the first of them, and the frozen part needs neither gradients nor moments.
"""

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from fp4rl_jax import models
from fp4rl_jax.arrays import Array, PyTree, unknown_name

Flat = dict[str, Array]
_STACKED = "layers/"
_ABOVE = "layers/above/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset:
    """The plan: the first trainable layer, and the paths trained from there on.

    Attributes:
        first_layer: layers below it are frozen; the number of layers where no layer is trained.
        num_layers: L.
        paths: trained leaves, by path in the stacked tree (`layers/attn/q`, `embed`).
    """

    first_layer: int
    num_layers: int
    paths: tuple[str, ...]

    @property
    def cuts(self) -> bool:
        """Whether the layers fall into a frozen stack below and a stack above."""
        return 0 < self.first_layer < self.num_layers


def plan(shapes: PyTree, patterns: tuple[str, ...], *, num_layers: int) -> Subset:
    """Makes the plan of `patterns` for a parameter tree.

    Args:
        shapes: the nested parameter dict, or its ShapeDtypeStructs.
        patterns: shell-style patterns over paths with the layer spelled out.
        num_layers: L.

    Raises:
        ValueError: a pattern matches nothing, or the selected layers are not a suffix.
    """
    spelled = {p: _spell(p, num_layers) for p in flat(shapes)}
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
    paths = tuple(sorted(path for path, row in hits.items() if any(row)))
    return Subset(first_layer=first, num_layers=num_layers, paths=paths)


def flat(params: PyTree) -> Flat:
    """The leaves of a nested dict by path, `a/b/c`."""
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    return leaves


def _spell(path: str, num_layers: int) -> list[str]:
    if not path.startswith(_STACKED):
        return [path]
    return [f"{_STACKED}{i}/{path.removeprefix(_STACKED)}" for i in range(num_layers)]


def split(params: PyTree, subset: Subset) -> tuple[Flat, Flat]:
    """Splits a nested tree into (trainable, frozen), both flat by path.

    Where the plan cuts the layers, their leaves are named `layers/below/...` (all frozen) and
    `layers/above/...`.
    """
    if subset.cuts:
        below, above = models.split_layers(params, subset.first_layer)["layers"]
        params = {**params, "layers": {"below": below, "above": above}}
    trained = {path.replace(_STACKED, _ABOVE) if subset.cuts else path for path in subset.paths}
    leaves = flat(params)
    return (
        {path: leaf for path, leaf in leaves.items() if path in trained},
        {path: leaf for path, leaf in leaves.items() if path not in trained},
    )


def merge(*parts: Flat) -> PyTree:
    """Joins flat parts to the nested tree that `models` takes; its layers are a tuple of stacks where cut.

    Exact: `split`'s inverse, up to that tuple.
    """
    tree = unflatten_dict({path: leaf for part in parts for path, leaf in part.items()}, sep="/")
    layers = tree.get("layers", {})
    return {**tree, "layers": (layers["below"], layers["above"])} if "below" in layers else tree


def untrained(trainable: Flat, frozen: Flat) -> PyTree:
    """The entries of `merge(trainable, frozen)` that hold no trained leaf.

    Layers are an entry only where the plan cuts them: a tuple of the stack below the cut.
    """
    trained = {path.split("/")[0] for path in trainable}
    tree = unflatten_dict(frozen, sep="/")
    layers = tree.pop("layers", {})
    found = {name: leaf for name, leaf in tree.items() if name not in trained}
    return {**found, "layers": (layers["below"],)} if "below" in layers else found


def join_layers(params: PyTree) -> PyTree:
    """The tree with one stack of layers, as checkpoints of other systems want it.

    Where the stacks' dtypes differ, a leaf has the wider one.
    """
    if not isinstance(params["layers"], tuple):
        return params
    return {**params, "layers": jax.tree.map(lambda *xs: jnp.concatenate(xs), *params["layers"])}
