"""What is executed at every site: precision, implementation and the reason, before anything runs."""

import dataclasses
from collections.abc import Mapping

import jax

from fp4rl_jax.arrays import dtype_of
from fp4rl_jax.ops import kernels, packing
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.operands import operand_dtype
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.quantizers import Nearest, Quantizer

#: What `SiteReport.precision` can say.
NATIVE, EMULATED, REFERENCE = "native", "emulated-exact", "reference"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteReport:
    """How one site's forward matmul is executed.

    Attributes:
        site: its name.
        weight, act, grad: formats of the operands (the activation's with its residual or smoothing);
            the side's dtype where unquantized, "-" where a gradient is not quantized.
        backward: the backward mode of the spec, and how the weight gradient's operands are rotated.
        precision: "native" (the hardware multiplies the elements as they are stored),
            "emulated-exact" (exactly decoded operands in a wider dtype, float32 accumulation, outer
            scales after it: equal to the native product up to the order of the sum) or "reference"
            (operands dequantized to float32, whose rounding no hardware matmul has).
        dtype: of the operands in the dot.
        impl: the chosen implementation; of packed weights, both the matmul's and the quantizer's.
        reason: why it and not an earlier one of the written order; for a published weight, also why it
            does not stay packed.
    """

    site: str
    weight: str
    act: str
    grad: str
    backward: str
    precision: str
    dtype: str
    impl: str
    reason: str


def report(
    side: Side, machine: Machine | None = None, *, published: Mapping[str, tuple[int, int]] | None = None
) -> tuple[SiteReport, ...]:
    """Reports every site of a side.

    Args:
        side: trainer's or rollout's.
        machine: the current one by default.
        published: (N, K) of every site's weight, of a side whose weights are published (the rollout's):
            they may stay packed. None where they are masters.
    """
    machine = machine or machines.current()
    found = []
    for name, spec in side.specs.items:
        dense = _site(name, spec, side, machine)
        if published is not None and spec.weight is not None:
            dense = _published(dense, spec, side, machine, published[name])
        found.append(dense)
    return tuple(found)


def _published(
    dense: SiteReport, spec: MatmulSpec, side: Side, machine: Machine, shape: tuple[int, int]
) -> SiteReport:
    """The report of a site whose weight is published, from that of its decoded form."""
    refused = packing.refusal(dense.site, spec, side, shape=shape, machine=machine)
    if refused is not None:
        return dataclasses.replace(dense, reason=f"{dense.reason}; not packed: {refused}")
    names, reasons = zip(*packing.choices(spec, side, shape, machine, rows=1), strict=True)
    return dataclasses.replace(
        dense,
        precision=EMULATED,
        dtype="bfloat16",
        impl=" + ".join(names),
        reason=f"weights stay packed; {'; '.join(dict.fromkeys(reasons))}",
    )


def _site(name: str, spec: MatmulSpec, side: Side, machine: Machine) -> SiteReport:
    plain = jax.ShapeDtypeStruct((), dtype_of(side.dtype))
    operands = (spec.act or plain, spec.weight or plain)
    select, natives = kernels.select_matmul, kernels.hardware_dtypes(machine)
    if name.startswith("experts/"):
        select, natives = kernels.select_grouped, ()
    dtype = operand_dtype(machine, *operands, natives=natives).name
    choice = select(kernels.facts_of(machine, x_dtype=dtype, w_dtype=dtype, order=side.order))
    quantized = [q for q in (spec.act, spec.weight) if q is not None]
    return SiteReport(
        site=name,
        weight=_format(spec.weight, side.dtype),
        act=_activation(spec, side.dtype),
        grad=_format(spec.grad, "-"),
        backward=spec.backward if spec.rotation == "none" else f"{spec.backward}, {spec.rotation}",
        precision=_precision(quantized, choice, side.dtype == dtype),
        dtype=dtype,
        impl=choice.impl.name,
        reason=choice.reason,
    )


def _precision(quantized: list[Quantizer], choice: kernels.Choice, same_dtype: bool) -> str:
    if choice.impl.name == "reference" or any(q.fmt.span == "block" for q in quantized):
        return REFERENCE
    if choice.impl.native or (not quantized and same_dtype):
        return NATIVE
    return EMULATED


def _activation(spec: MatmulSpec, dtype: str) -> str:
    """The activation's format, and what a residual or smoothing does beside it."""
    parts = [_format(spec.act, dtype)]
    if spec.residual is not None:
        parts.append(spec.residual.label)
    if spec.smoothing is not None:
        parts.append(f"smoothing {spec.smoothing:g}")
    return " + ".join(parts)


def cache(side: Side) -> str:
    """The format of a side's keys and values, as a site's cell says it; "-" where they are not quantized."""
    return _format(side.kv, "-")


def _format(quantizer: Quantizer | None, otherwise: str) -> str:
    """`nvfp4(outer=row)`: the format's name, and whatever of it and of the quantizer is not the default."""
    if quantizer is None:
        return otherwise
    values = {f.name: (getattr(quantizer.fmt, f.name), f.default) for f in dataclasses.fields(quantizer.fmt)}
    options = [f"{name}={value}" for name, (value, default) in values.items() if value != default]
    options += [quantizer.rotation] if quantizer.rotation != "none" else []
    options += [] if isinstance(quantizer.rounding, Nearest) else [type(quantizer.rounding).__name__.lower()]
    return quantizer.fmt.name + (f"({', '.join(options)})" if options else "")
