"""DAPO (arXiv 2503.14476): clip-higher, token mean, overlong shaping, dynamic sampling.

    r' = r + overlong_coef * penalty(length)         0 up to L_max - L_cache, then linearly to -1 at L_max
    A = (r' - mean) / (std + eps) over the group
    loss = mean over all tokens of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A) w

L_max is the completion width of the batch, L_cache the share `overlong_share` of it (4096 of
20480 tokens in the paper). `wanted` drops the groups whose rewards (before shaping) are all
equal: the loop samples on until it has the asked number of mixed groups. No KL term by default.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array, check_name
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.objectives import advantages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.NormalizedConfig):
    """DAPO's settings.

    Attributes:
        overlong_share: L_cache / L_max, in (0, 1].
        overlong_coef: weight of the penalty, in units of the reward; 0 turns shaping off.
        dynamic_sampling: "on" drops groups without a contrast, "off" keeps every group.
    """

    clip_high: float = 0.28
    overlong_share: float = 0.2
    overlong_coef: float = 1.0
    dynamic_sampling: Literal["on", "off"] = "on"

    def __post_init__(self) -> None:
        super().__post_init__()
        _common.require_not_negative(overlong_coef=self.overlong_coef)
        if not 0 < self.overlong_share <= 1:
            raise ValueError(f"overlong_share is {self.overlong_share}, expected 0 < overlong_share <= 1")
        check_name("dynamic_sampling", self.dynamic_sampling, ("on", "off"))


def _shaped(rewards: Array, rollouts: Rollouts, config: Config) -> Array:
    width = _common.completion_width(rollouts)
    penalty = advantages.overlong_penalty(
        jnp.sum(rollouts.loss_mask, axis=1), max_length=width, cache=config.overlong_share * width
    )
    return _common.group_normalized(rewards + config.overlong_coef * penalty, rollouts, config)


validate = _common.validate_group
prepare = _common.prepare_with(_shaped, validate=validate)
loss = _common.loss_with(_common.surrogate, mean=_common.token_mean)


def wanted(rewards: Array, config: Config) -> Array:
    """[P] bool from rewards [P, group_size]: groups whose rewards are not all equal."""
    if config.dynamic_sampling == "off":
        return _common.all_groups(rewards)
    return advantages.mixed_groups(rewards)
