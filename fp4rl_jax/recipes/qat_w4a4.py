"""Symmetric quantization-aware training: W4A4 on both sides (the "4-bitter Lesson" setting, in NVFP4)."""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.spec import Backward, MatmulSpec, SideSpec
from fp4rl_jax.recipes._parts import ScaleRule, SiteConfig, act_of, rule_of, side, weight_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """`sites`: what both sides quantize.

    Attributes:
        format: of weights and activations.
        scale_rule: of MXFP4's block scales; none is the format's own, "floor".
        backward: operands of the trainer's gradient matmuls; see `fp4rl_jax.ops.matmul`.
    """

    format: Literal["nvfp4", "hif4", "mxfp4"] = "nvfp4"
    scale_rule: ScaleRule | None = None
    backward: Backward = "dequantized"

    def __post_init__(self) -> None:
        rule_of(self.format, self.scale_rule)


def _quantized(config: Config) -> MatmulSpec:
    rule = rule_of(config.format, config.scale_rule)
    return MatmulSpec(weight=weight_of(config.format, **rule), act=act_of(config.format, **rule))


def trainer(config: Config) -> SideSpec:
    """Fake-quantizes weights and activations; gradients pass straight through."""
    return side(config, dataclasses.replace(_quantized(config), backward=config.backward))


def rollout(config: Config) -> SideSpec:
    """4-bit weights and activations."""
    return side(config, _quantized(config))
