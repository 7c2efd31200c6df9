"""Rollout-ResQ (arXiv 2607.26515): FP4 forward and backward on both sides, a sparse residual in the rollout.

The rollout computes y = Q(x) Q(w)^T + S(Q(x - Q(x))) Q(w)^T: the residual is quantized first, then
sparsified. The trainer computes the first term alone and quantizes all operands of the gradients.
"""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.spec import Backward, MatmulSpec, SideSpec
from fp4rl_jax.quantizers import residual
from fp4rl_jax.recipes._parts import (
    ScaleRule,
    SiteConfig,
    act_of,
    gradient_of,
    residual_of,
    rule_of,
    side,
    weight_of,
)

#: The backward modes whose matmuls take quantized gradients.
QUANTIZED_GRADIENTS = ("requantized", "reused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """The headline setting: HiF4, 2:4 along the contraction axis.

    Attributes:
        format: of every operand.
        scale_rule: of MXFP4's block scales in weights, activations and residual; none is the format's own,
            "floor".
        selection: S: "pattern_2_4", "pairs_4_8", "channels" (half, by L2), "tiles_32x64" (half) or "dense".
        scope: for "channels" only: they are chosen over the tokens of each "call" (the paper's, and where
            nothing is said), or, so that a token's result does not depend on its batch, at publish from
            running statistics ("static") or within each "token".
        tile_rows: for "tiles_32x64" only: tokens a tile, 32 where nothing is said; with 1 the few rows of a
            decoding step are not padded.
        backward: operands of the gradient matmuls; see `fp4rl_jax.ops.matmul`. Gradients are
            quantized with "requantized" and "reused".
        rounding: of the quantized gradients, "nearest" or "stochastic".
        rotation: "hadamard16" rotates the operands of the weight gradient ("requantized" only).
        grad_outer: an outer scale for gradients in HiF4, whose range ends at 1e-12: one a "tensor" or
            a "row"; "none" is the format as published.
    """

    format: Literal["hif4", "mxfp4", "nvfp4"] = "hif4"
    scale_rule: ScaleRule | None = None
    selection: Literal["pattern_2_4", "pairs_4_8", "channels", "tiles_32x64", "dense"] = "pattern_2_4"
    scope: Literal["call", "static", "token"] | None = None
    tile_rows: int | None = None
    backward: Backward = "requantized"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rotation: Literal["none", "hadamard16"] = "none"
    grad_outer: Literal["none", "tensor", "row"] = "none"

    def __post_init__(self) -> None:
        rule_of(self.format, self.scale_rule)
        for field, owner in (("scope", "channels"), ("tile_rows", "tiles_32x64")):
            value = getattr(self, field)
            if value is not None and self.selection != owner:
                raise ValueError(
                    f"{field} = {value!r} is for selection = {owner!r}, got selection = {self.selection!r}"
                )
        for field, plain in (("rounding", "nearest"), ("grad_outer", "none")):
            value = getattr(self, field)
            if value != plain and self.backward not in QUANTIZED_GRADIENTS:
                raise ValueError(
                    f"{field} = {value!r} is of quantized gradients: expected backward = 'requantized' or"
                    f" 'reused', got backward = {self.backward!r}"
                )


def trainer(config: Config) -> SideSpec:
    """W4A4 in forward and backward, without the residual."""
    quantized = config.backward in QUANTIZED_GRADIENTS
    rule = rule_of(config.format, config.scale_rule)
    spec = MatmulSpec(
        weight=weight_of(config.format, **rule),
        act=act_of(config.format, **rule),
        grad=gradient_of(config.format, rounding=config.rounding, outer=config.grad_outer)
        if quantized
        else None,
        rotation=config.rotation,
        backward=config.backward,
    )
    return side(config, spec)


def rollout(config: Config) -> SideSpec:
    """W4A4 with the sparse residual."""
    options = {
        "channels": {"scope": config.scope or "call"},
        "tiles_32x64": {"rows": 32 if config.tile_rows is None else config.tile_rows},
    }
    selection = residual.make(config.selection, **options.get(config.selection, {}))
    rule = rule_of(config.format, config.scale_rule)
    second = residual_of(config.format, selection, order="quantize_first", scale_rule=config.scale_rule)
    weight, act = weight_of(config.format, **rule), act_of(config.format, **rule)
    spec = MatmulSpec(weight=weight, act=act, residual=second)
    return side(config, spec)
