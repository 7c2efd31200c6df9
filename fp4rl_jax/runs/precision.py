"""What runs in which precision: for every site of both sides, before anything is computed.

The same facts and the same choice as the matmul's own, so the report cannot say something else
than what runs. `executed` is one of

    native            the device multiplies the operands in their quantized format
    emulated-exact    exactly decoded operands in a wider dot: the same products, no FP4 speed
    reference         the plain definition, slow
    unquantized       no operand is quantized
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax import models
from fp4rl_jax.arrays import dtype_of
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops import kernels, machine, operands
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.quantizers import Quantizer

UNQUANTIZED = "unquantized"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SitePrecision:
    """How one side executes one site's matmul.

    Attributes:
        weight, act, grad: the operand's format with its options that are not the default, or the
            side's dtype where the operand is not quantized.
        backward: which operands the gradient matmuls use.
        operand_dtype: dtype of the dot's operands.
        implementation: name of the chosen implementation.
        reason: why it and none before it in the written order.
        executed: see the module's docstring.
    """

    weight: str
    act: str
    grad: str
    backward: str
    operand_dtype: str
    implementation: str
    reason: str
    executed: str


def site_precisions(model: ModelConfig, side: Side, *, num_rows: int) -> dict[str, SitePrecision]:
    """Every site of `model` with how `side` executes its matmul on the current machine.

    Args:
        model: the model's shape.
        side: trainer or rollout.
        num_rows: rows of x in one call, tokens for a forward pass and sequences for a decode step.
    """
    found = {}

    def visit(site: str, weight: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        grouped = weight.ndim == 4  # [L, E, N, K]
        select = kernels.select_grouped_matmul if grouped else kernels.select_matmul
        found[site] = _precision(side, side.specs[site], (num_rows, *weight.shape[-2:]), select)
        return weight

    models.map_sites(visit, _fused(model))
    return {site: found[site] for site in models.sites(model)}


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


def implementations(precisions: Mapping[str, Mapping[str, SitePrecision]]) -> dict[str, Any]:
    """The manifest's form: {"trainer": {site: {...}}, "rollout": {site: {...}}} of plain values."""
    return {
        side: {site: dataclasses.asdict(precision) for site, precision in sites.items()}
        for side, sites in precisions.items()
    }


def table(trainer: Mapping[str, SitePrecision], rollout: Mapping[str, SitePrecision]) -> str:
    """Sites times sides as aligned text; a site that the sides quantize differently has a `*`."""
    rows = [("site", "side", "weight", "activation", "backward", "dot in", "executed", "implementation")]
    for site, mine in trainer.items():
        theirs = rollout[site]
        differ = (mine.weight, mine.act) != (theirs.weight, theirs.act)
        rows += [_cells(f"{site} *" if differ else site, "trainer", mine), _cells("", "rollout", theirs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def reasons(*sides: Mapping[str, SitePrecision]) -> str:
    """Why each implementation was chosen, one line for each different reason."""
    found = {f"{p.implementation}: {p.reason}" for side in sides for p in side.values()}
    return "\n".join(sorted(found))


def difference(trainer: tuple[str, ...], rollout: tuple[str, ...]) -> str:
    """What only one side leaves unquantized, a line each; "none" where the lists are equal."""
    only = [f"only the trainer: {part}" for part in trainer if part not in rollout]
    only += [f"only the rollout: {part}" for part in rollout if part not in trainer]
    return "\n".join(only) or "none"


def _cells(site: str, side: str, p: SitePrecision) -> tuple[str, ...]:
    backward = "-" if side == "rollout" else p.backward
    return (site, side, p.weight, p.act, backward, p.operand_dtype, p.executed, p.implementation)


def _fused(model: ModelConfig) -> Any:
    return jax.eval_shape(models.fuse, models.abstract_params(model))


def _other_leaves(model: ModelConfig) -> list[str]:
    """Paths of the fused tree's leaves that are no site's weight."""
    marked = models.map_sites(lambda site, weight: None, _fused(model))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(marked)]
    return ["/".join(str(entry.key) for entry in path) for path in paths]


def _precision(
    side: Side,
    spec: MatmulSpec,
    dims: tuple[int, int, int],
    select: Callable[[kernels.Facts], kernels.Choice],
) -> SitePrecision:
    m, n, k = dims
    dtype = dtype_of(side.dtype)
    plain = jnp.zeros((), dtype)
    here = machine.current()
    operand = operands.operand_dtype(here, spec.act or plain, spec.weight or plain).name
    facts = kernels.facts_of(here, m=m, n=n, k=k, x_dtype=operand, w_dtype=operand, order=side.order)
    choice = select(facts)
    return SitePrecision(
        weight=_operand(spec.weight, side.dtype),
        act=_operand(spec.act, side.dtype),
        grad=_operand(spec.grad, side.dtype),
        backward=spec.backward if spec.weight or spec.act else UNQUANTIZED,
        operand_dtype=operand,
        implementation=choice.impl.name,
        reason=choice.reason,
        executed=_executed(spec, choice.impl.name, operand),
    )


def _executed(spec: MatmulSpec, implementation: str, operand: str) -> str:
    if implementation == "reference":
        return "reference"
    if spec.weight is None and spec.act is None:
        return UNQUANTIZED
    return "native" if operand.startswith("float8") else "emulated-exact"


def _operand(quantizer: Quantizer | None, dtype: str) -> str:
    """`nvfp4(outer=row)`: the format's name and every option that is not its default."""
    if quantizer is None:
        return dtype
    fmt = quantizer.fmt
    options = [
        f"{field.name}={getattr(fmt, field.name)}"
        for field in dataclasses.fields(fmt)
        if getattr(fmt, field.name) != field.default
    ]
    return fmt.name + (f"({', '.join(options)})" if options else "")
