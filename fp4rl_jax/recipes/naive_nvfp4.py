"""NVFP4 W4A4 rollout, unquantized trainer: the arm that must fail."""

import dataclasses

from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.recipes._parts import SiteConfig, kv_of, nvfp4_act, nvfp4_weight, side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """`sites`: what the rollout quantizes. `kv`: of each side by itself, like all keys."""


def trainer(config: Config) -> SideSpec:
    """Full precision at every site: the trainer knows nothing of the rollout's grid."""
    return SideSpec(kv=kv_of(config.kv))


def rollout(config: Config) -> SideSpec:
    """NVFP4 weights and activations."""
    return side(config, MatmulSpec(weight=nvfp4_weight(), act=nvfp4_act()))
