"""Single channels (QUADS as read literally, and the S_50% of Rollout-ResQ, arXiv 2607.26515)."""

import dataclasses

from fp4rl_jax.quantizers.residual._columns import Columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channels(Columns):
    """Units are single columns; they meet the dequantized columns of the weight."""

    def unit(self, block: int) -> int:
        del block
        return 1


SELECTION = Channels()
