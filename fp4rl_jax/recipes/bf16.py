"""The yardstick: nothing is quantized on either side."""

import dataclasses

from fp4rl_jax.ops.spec import SideSpec
from fp4rl_jax.recipes._parts import CacheConfig, kv_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(CacheConfig):
    """`kv`: each side's KV cache; no linear layer is quantized."""


def trainer(config: Config) -> SideSpec:
    """Full precision at every site."""
    return SideSpec(kv=kv_of(config.kv))


def rollout(config: Config) -> SideSpec:
    """Full precision at every site."""
    return SideSpec(kv=kv_of(config.kv))
