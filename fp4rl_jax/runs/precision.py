"""Both sides of a run beside each other: what every site executes, and what stays unquantized.

What is executed comes from `ops.report`, the same facts and the same choice as the matmul's own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from fp4rl_jax import models, ops
from fp4rl_jax.models import ModelConfig, guidance
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.report import cache
from fp4rl_jax.ops.spec import Side


def reports(
    name: str, side: Side, model: ModelConfig, machine: Machine | None = None
) -> tuple[ops.SiteReport, ...]:
    """`ops.report` of a side of `model`: the weights of the "rollout" are published, others are masters."""
    shapes = {site: (shape[-2], shape[-1]) for site, shape in models.site_shapes(model).items()}
    return ops.report(side, machine, published=shapes if name == "rollout" else None)


def implementations(sides: Mapping[str, Side], model: ModelConfig) -> dict[str, dict[str, Any]]:
    """The manifest's form: {"trainer": {site: {...}}, "rollout": {site: {...}}} of plain values."""
    return {
        name: {found.site: dataclasses.asdict(found) for found in reports(name, side, model)}
        for name, side in sides.items()
    }


def table(trainer: Side, rollout: Side, model: ModelConfig, machine: Machine | None = None) -> str:
    """Sites times sides as aligned text; a site that the sides quantize differently has a `*`."""
    rows = [("site", "side", "weight", "activation", "backward", "dot in", "executed", "implementation")]
    both = (reports(*side, model, machine) for side in (("trainer", trainer), ("rollout", rollout)))
    for ours, theirs in zip(*both, strict=True):
        differ = (ours.weight, ours.act) != (theirs.weight, theirs.act)
        rows += [
            _cells(f"{ours.site} *" if differ else ours.site, "trainer", ours),
            _cells("", "rollout", theirs),
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def reasons(sides: Mapping[str, Side], model: ModelConfig, machine: Machine | None = None) -> str:
    """Why each implementation was chosen, one line for each different reason."""
    found = {
        f"{report.impl}: {report.reason}"
        for name, side in sides.items()
        for report in reports(name, side, model, machine)
    }
    return "\n".join(sorted(found))


def recorded(trainer: Side, rollout: Side, model: ModelConfig) -> str:
    """The KV cache of both sides, and what the rollout records for the trainer, a line each."""
    lines = [f"kv cache: trainer {cache(trainer)}, rollout {cache(rollout)}"]
    capture = rollout.specs.capture
    if capture is None:
        return "\n".join([*lines, "recorded: nothing"])
    forms = [f"{site} {capture.form}" for site in capture.sites]
    forms += [f"kv {capture.kv}"] if capture.kv is not None else []
    layers = f"layers {capture.first_layer(model.num_layers)} to {model.num_layers - 1}"
    size = guidance.record_bytes(model, rollout.specs, rollout.kv)
    return "\n".join([*lines, f"recorded: {', '.join(forms)}, {layers}, {size} bytes a token"])


def unquantized(model: ModelConfig, side: Side) -> tuple[str, ...]:
    """Everything of `model` that `side` leaves unquantized: sites, other parameters, the KV cache."""
    specs = {site: side.specs[site] for site in models.sites(model)}
    parts = [site for site, spec in specs.items() if spec.weight is None]
    parts += [f"{site} (activations)" for site, spec in specs.items() if spec.act is None]
    parts += _other_leaves(model)
    if model.tie_embeddings:
        parts.append("head (tied to embed)")
    if side.kv is None:
        parts.append("kv cache")
    return tuple(parts)


def difference(trainer: tuple[str, ...], rollout: tuple[str, ...]) -> str:
    """What only one side leaves unquantized, a line each; "none" where the lists are equal."""
    only = [f"only the trainer: {part}" for part in trainer if part not in rollout]
    only += [f"only the rollout: {part}" for part in rollout if part not in trainer]
    return "\n".join(only) or "none"


def _cells(site: str, side: str, found: ops.SiteReport) -> tuple[str, ...]:
    quantized = found.grad != "-"
    backward = f"{found.backward}, dy {found.grad}" if quantized else found.backward
    backward = backward if side == "trainer" else "-"
    return (site, side, found.weight, found.act, backward, found.dtype, found.precision, found.impl)


def _other_leaves(model: ModelConfig) -> list[str]:
    """Paths of the fused tree's leaves that are no site's weight."""
    fused = jax.eval_shape(models.fuse, models.abstract_params(model))
    marked = models.map_sites(lambda site, weight: None, fused)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(marked)]
    return ["/".join(str(entry.key) for entry in path) for path in paths]
