"""The `ops` section of a configuration."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpsConfig:
    """How operations are computed on both sides.

    Attributes:
        order: "free" takes the fastest order of every sum. "fixed" makes a row's result independent
            of the other rows and of how many there are, so that equal inputs give equal bits on both
            sides; CPU only, and slower.
    """

    order: Literal["free", "fixed"] = "free"
