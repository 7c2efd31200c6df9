"""The yardstick: nothing is quantized on either side."""

import dataclasses

from fp4rl_jax.ops.spec import SideSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """No knobs."""


def trainer(config: Config) -> SideSpec:
    """Full precision at every site."""
    del config
    return SideSpec()


def rollout(config: Config) -> SideSpec:
    """Full precision at every site."""
    del config
    return SideSpec()
