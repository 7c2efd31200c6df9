"""Symmetric quantization-aware training: NVFP4 W4A4 on both sides (the "4-bitter Lesson" setting)."""

import dataclasses

from fp4rl_jax.ops.spec import Backward, MatmulSpec, SideSpec
from fp4rl_jax.recipes._parts import SiteConfig, nvfp4_act, nvfp4_weight, side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """`sites`: what both sides quantize.

    Attributes:
        backward: operands of the trainer's gradient matmuls; see `fp4rl_jax.ops.matmul`.
    """

    backward: Backward = "dequantized"


def trainer(config: Config) -> SideSpec:
    """Fake-quantizes weights and activations; gradients pass straight through."""
    spec = MatmulSpec(weight=nvfp4_weight(), act=nvfp4_act(), backward=config.backward)
    return side(config, spec)


def rollout(config: Config) -> SideSpec:
    """NVFP4 weights and activations."""
    return side(config, MatmulSpec(weight=nvfp4_weight(), act=nvfp4_act()))
