"""The frozen part of a model, made ready once: no update pays for quantizing what never changes."""

from typing import Any

from flax.traverse_util import unflatten_dict

from fp4rl_jax import models, ops
from fp4rl_jax.arrays import PyTree, dtype_of
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.trainer.subset import Flat


def backbone(frozen: Flat, *, model: models.ModelConfig, side: Side) -> PyTree:
    """Fuses, quantizes and decodes the frozen stack of layers and the frozen head.

    Args:
        frozen: the frozen parameters of the state.
        model: whose parameters they are.
        side: the trainer's.

    Returns:
        {"layers": the stack below the trained layers, "head": the head}, each only where nothing
        of it is trained.

    Exact: what the forward makes of the same masters at every update, bit for bit.
    """
    tree = unflatten_dict(frozen, sep="/")
    found: dict[str, Any] = {}
    if "below" in tree.get("layers", {}):
        below = models.fuse({"layers": tree["layers"]["below"]})
        found["layers"] = ops.prepare(models.map_sites(lambda s, w: _ready(s, w, side), below))["layers"]
    head = "embed" if model.tie_embeddings else "head"
    if head in tree:
        found["head"] = models.prepare({head: tree[head]}, side)["head"]
    return models.constrain_params(found, model, side.layout)


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
