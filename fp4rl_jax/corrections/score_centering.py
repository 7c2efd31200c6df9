"""Score Centering (arXiv 2609.20807): no weight; a term cancels the drift (`objectives.centering`)."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.corrections import _common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Score Centering's settings.

    Attributes:
        num_candidates: k, the likeliest tokens of every position that the rollout records with their
            log-probs, 8 bytes each.
    """

    num_candidates: int = 16

    def __post_init__(self) -> None:
        if self.num_candidates < 1:
            raise ValueError(f"num_candidates is {self.num_candidates}, expected at least 1")


def weights(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] float32: 1 on the mask, 0 off it."""
    del config
    _common.detached(log_ratio, loss_mask)
    return loss_mask.astype(jnp.float32)


def clipped(log_ratio: Array, loss_mask: Array, config: Config) -> Array:
    """[B, T] bool: False everywhere."""
    del config
    _common.detached(log_ratio, loss_mask)
    return jnp.zeros_like(loss_mask)
