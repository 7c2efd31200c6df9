"""W8A8 rollout, unquantized trainer: FlashRL's setting with FP8 E4M3."""

import dataclasses

from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.recipes._parts import SiteConfig, fp8, kv_of, side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """`sites`: what the rollout quantizes. `kv`: of each side by itself, like all keys."""


def trainer(config: Config) -> SideSpec:
    """Full precision at every site."""
    return SideSpec(kv=kv_of(config.kv))


def rollout(config: Config) -> SideSpec:
    """FP8 weights (a scale an output channel) and activations (a scale a token)."""
    return side(config, MatmulSpec(weight=fp8(), act=fp8()))
