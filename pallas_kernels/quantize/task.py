"""What one call of `quantize` is asked for, in static terms, and what it returns."""

import dataclasses
from types import ModuleType
from typing import Literal, NamedTuple

import jax

from pallas_kernels.quantize import hif4, mxfp4, nvfp4

Array = jax.Array

FORMATS: dict[str, ModuleType] = {m.NAME: m for m in (nvfp4, mxfp4, hif4)}

Outer = Literal["row", "static", "none"]
OuterRounding = Literal["pow2", "fp32"]
Residual = Literal["none", "dense", "2:4"]
Order = Literal["kernel", "natural"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A format with its options, and the outputs asked for; hashable.

    Attributes:
        fmt: "nvfp4", "mxfp4" or "hif4".
        outer: NVFP4's outer scale: one a "row", or "static", given by the caller: a power of two from 2^-126
            on. "none" for the formats without.
        outer_rounding: of an outer scale a row: "pow2", or "fp32", the vendor's.
        scale_rule: MXFP4's rule for a block's exponent, one of `mxfp4.RULES`.
        residual: second operand from x - first operand * outer scale, quantized in the same format with an
            outer scale of its own where the format has one: "dense", or "2:4", the two largest of every
            four elements after quantization (ties: the lower index).
        folded: the residual operand is multiplied by its outer scale over the first one's, so that both
            share an accumulator; the residual's outer scale is then not returned.
        order: of the operands' columns: "kernel", as the packed weights have them, or "natural".
        codes: also returns packed codes and scale bytes.
        compact: also returns the lowest bit of every code, and scale bytes.
        width: columns of the operands; 0 for k itself rounded up to whole chunks of the format. More
            than k holds zeros.
    """

    fmt: str
    outer: Outer = "none"
    outer_rounding: OuterRounding = "pow2"
    scale_rule: str = "floor"
    residual: Residual = "none"
    folded: bool = True
    order: Order = "kernel"
    codes: bool = False
    compact: bool = False
    width: int = 0

    def __post_init__(self) -> None:
        if self.fmt not in FORMATS:
            raise ValueError(f"fmt must be one of {', '.join(FORMATS)}, got {self.fmt!r}")
        has_outer = self.form.OUTER
        allowed = ("row", "static") if has_outer else ("none",)
        if self.outer not in allowed:
            raise ValueError(f"outer of {self.fmt} must be one of {allowed}, got {self.outer!r}")
        if self.scale_rule not in mxfp4.RULES:
            raise ValueError(f"scale_rule must be one of {', '.join(mxfp4.RULES)}, got {self.scale_rule!r}")
        if self.residual not in ("none", "dense", "2:4"):
            raise ValueError(f"residual must be none, dense or 2:4, got {self.residual!r}")
        if self.outer_rounding not in ("pow2", "fp32") or self.order not in ("kernel", "natural"):
            raise ValueError(f"unknown outer_rounding {self.outer_rounding!r} or order {self.order!r}")
        if self.residual != "none" and self.folded and self.outer_rounding == "fp32":
            raise ValueError("a residual is folded under outer scales that are powers of two: folded=False")
        if self.width % self.chunk:
            raise ValueError(f"width must be a multiple of {self.chunk} for {self.fmt}, got {self.width}")

    @property
    def form(self) -> ModuleType:
        """The file of the format."""
        return FORMATS[self.fmt]

    @property
    def block(self) -> int:
        """Elements that share a block scale."""
        return self.form.BLOCK

    @property
    def chunk(self) -> int:
        """Columns inside which the kernel's order permutes: four blocks."""
        return 4 * self.form.BLOCK

    @property
    def wants_scales(self) -> bool:
        """Whether scale bytes are returned."""
        return self.codes or self.compact

    def columns(self, k: int) -> int:
        """Columns of the operands."""
        return self.width or -(-k // self.chunk) * self.chunk


class Quantized(NamedTuple):
    """Outputs; None where not asked for.

    Attributes:
        operand: [m, columns] bfloat16, element times block scale.
        outer: [m] float32, or None where the format has none.
        residual: [m, columns] bfloat16, or None.
        residual_outer: [m] float32, or None where the format has none or it is folded.
        packed: [m, k / 2] uint8, two codes a byte, the first in the low nibble.
        scales: [m, k / block * bytes] uint8.
        bits: [m, k / 8] uint8, the lowest bit of every code, element 0 in the lowest bit.
    """

    operand: Array
    outer: Array | None = None
    residual: Array | None = None
    residual_outer: Array | None = None
    packed: Array | None = None
    scales: Array | None = None
    bits: Array | None = None
