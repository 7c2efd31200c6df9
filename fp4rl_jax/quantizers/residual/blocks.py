"""Whole blocks of the format (QUADS, arXiv 2607.15810): the second term reuses W's codes and scales."""

import dataclasses

from fp4rl_jax.quantizers.residual._columns import Columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks(Columns):
    """Units are the blocks that share a scale (16 columns of NVFP4), aligned to the weight's own."""

    def unit(self, block: int) -> int:
        return block


SELECTION = Blocks()
