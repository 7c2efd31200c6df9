"""Asymmetric quantization-aware training: W4A16 trainer, NVFP4 W4A4 rollout (QUADS 1.2)."""

import dataclasses

from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.recipes._parts import SiteConfig, nvfp4_act, nvfp4_weight, side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """`sites`: what both sides quantize."""


def trainer(config: Config) -> SideSpec:
    """Fake-quantizes weights only; activations and gradients are untouched."""
    return side(config, MatmulSpec(weight=nvfp4_weight()))


def rollout(config: Config) -> SideSpec:
    """NVFP4 weights and activations."""
    return side(config, MatmulSpec(weight=nvfp4_weight(), act=nvfp4_act()))
