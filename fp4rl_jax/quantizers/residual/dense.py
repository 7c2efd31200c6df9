"""The whole residual: a second full product (the Dense of Rollout-ResQ, arXiv 2607.26515)."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Selection):
    """Keeps everything."""

    @property
    def batch_invariant(self) -> bool:
        return True

    def kept_share(self, length: int, block: int) -> float:
        del length, block
        return 1.0

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        del residual, x, block
        return jnp.ones((1, 1), bool)


SELECTION = Dense()
