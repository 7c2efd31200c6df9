"""The frozen part of a model, made ready once: no update pays for quantizing what never changes."""

from typing import Any

from fp4rl_jax import models, ops
from fp4rl_jax.arrays import PyTree, dtype_of
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.trainer.subset import Flat, merge


def backbone(frozen: Flat, *, side: Side) -> PyTree:
    """Fuses, quantizes and decodes the frozen stack of layers and the frozen head.

    Args:
        frozen: the frozen parameters of the state.
        side: the trainer's.

    Returns:
        {"layers": the stack below the trained layers, "head": the head}, each only where nothing
        of it is trained.

    Exact: what the forward makes of the same masters at every update, bit for bit.
    """
    params = merge(frozen)
    found: dict[str, Any] = {}
    if isinstance(params.get("layers"), tuple):
        below = models.fuse({"layers": params["layers"][0]})
        found["layers"] = ops.prepare(models.map_sites(lambda s, w: _ready(s, w, side), below))["layers"]
    if "head" in params or "embed" in params:
        found["head"] = models.prepare(params, side)["head"]
    return found


def _ready(site: str, weight: Any, side: Side) -> Any:
    quantizer = side.specs[site].weight
    if quantizer is None:
        return weight.astype(dtype_of(side.dtype))
    return ops.quantize_weight(weight, quantizer)


def with_backbone(fused: PyTree, base: PyTree) -> PyTree:
    """The tree that `forward` takes, with the backbone in place of what it was made from."""
    if "layers" in base:
        fused = {**fused, "layers": (base["layers"], fused["layers"][1])}
    return {**fused, "head": base["head"]} if "head" in base else fused
