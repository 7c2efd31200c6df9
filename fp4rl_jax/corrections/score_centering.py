"""Score Centering (arXiv 2609.20807): no weight; a term cancels the drift (`objectives.centering`)."""

import dataclasses

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


weights = _common.unweighted
clipped = _common.nothing_clipped
