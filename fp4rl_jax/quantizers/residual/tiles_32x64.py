"""Half of the tiles of 32 tokens x 64 channels (S_50%^32x64 of Rollout-ResQ, arXiv 2607.26515)."""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.quantizers.residual._base import Selection, number_kept, runs, top

COLUMNS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles(Selection):
    """Keeps the tiles with the largest L2 norm, of all tiles of the call.

    A token's result depends on its batch mates: tiles of other tokens compete with its own.

    Attributes:
        rows: tokens a tile, 32, or 1 for calls of few tokens; zeros pad the last tile.
        ratio: share of the tiles kept, in (0, 1].
    """

    rows: int = 32
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.rows < 1 or not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"expected rows >= 1 and ratio in (0, 1], got {self.rows} and {self.ratio}")

    @property
    def batch_invariant(self) -> bool:
        return False

    def kept_share(self, length: int, block: int) -> float:
        del length, block
        return self.ratio

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        del x, block
        m, k = residual.shape
        wide = runs(residual * residual, COLUMNS)  # [M, k / 64, 64]
        padded = jnp.pad(wide, ((0, -m % self.rows), (0, 0), (0, 0)))
        tiles = padded.reshape(-1, self.rows, wide.shape[1], COLUMNS)
        energy = jnp.sum(tiles, axis=(1, 3))  # [bands, k / 64]
        best = top(energy.reshape(-1), number_kept(self.ratio, energy.size))
        kept = jnp.zeros(energy.size, bool).at[best].set(True).reshape(energy.shape)
        return jnp.repeat(jnp.repeat(kept, self.rows, axis=0)[:m], COLUMNS, axis=1)[:, :k]


SELECTION = Tiles()
