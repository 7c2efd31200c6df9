"""No correction: every token weighs 1, the mismatch is only measured."""

import dataclasses

from fp4rl_jax.corrections import _common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Nothing to set."""


weights = _common.unweighted
clipped = _common.nothing_clipped
