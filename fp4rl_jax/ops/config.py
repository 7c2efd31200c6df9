"""The `ops` section of a configuration."""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.stats import Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """How operations are computed on both sides.

    Attributes:
        order: "free" takes the fastest order of every sum. "fixed" makes a row's result independent
            of the other rows and of how many there are, so that equal inputs give equal bits on both
            sides; CPU only, and slower.
        fused_attention: "auto" takes the kernels that a GPU has for attention: one for blocks of queries and
            another for a single new token, which round differently. "never" takes the compiler's dots for
            both, so that the engines of both sides are one.
        stats: which activations of both sides are counted in the metrics `quant/...`: those of one token
            in 13 ("sampled"), of every token, and the weights that the trainer quantizes ("on", dear),
            or none ("off").
    """

    order: Literal["free", "fixed"] = "free"
    fused_attention: Literal["auto", "never"] = "auto"
    stats: Stats = "sampled"
