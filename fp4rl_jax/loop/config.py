"""Settings of the loop: how much is collected and how long it goes on."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How many rollouts make a step, and how many steps a run has.

    Attributes:
        steps: steps of the whole run; a resumed run ends at the same number.
        num_prompts: prompts (groups) a step trains on, over all devices and hosts.
        group_size: completions per prompt.
        max_rounds: sampling rounds a step may use where the algorithm drops groups.
    """

    steps: int = 100
    num_prompts: int = 8
    group_size: int = 8
    max_rounds: int = 8

    def validate(self, root: Any) -> None:
        """Checks the counts; ValueError naming the dotted key."""
        for field in ("steps", "num_prompts", "group_size", "max_rounds"):
            if getattr(self, field) < 1:
                raise ValueError(f"loop.{field} = {getattr(self, field)}: expected at least 1")
