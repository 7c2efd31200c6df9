"""Settings of the loop and of the evaluations around it."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of the rollout policy on the task's held-out problems.

    A run with `problems` above 0 is evaluated before its first step and after its last, and the
    difference is reported as a paired one.

    Attributes:
        problems: held-out problems used, the first of the task's; 0 turns evaluation off.
        samples: completions a problem; more than one needs a temperature.
        temperature: of the samples; 0 is greedy.
        every: steps between further evaluations; 0 makes none.
        batch_prompts: problems sampled in one call.
    """

    problems: int = 0
    samples: int = 1
    temperature: float = 0.0
    every: int = 0
    batch_prompts: int = 64

    def validate(self, root: Any) -> None:
        """Checks the counts; ValueError naming the dotted key."""
        least = {"problems": 0, "samples": 1, "every": 0, "batch_prompts": 1}
        for field, low in least.items():
            if getattr(self, field) < low:
                raise ValueError(f"eval.{field} = {getattr(self, field)}: expected at least {low}")
        if self.samples > 1 and self.temperature <= 0:
            raise ValueError(
                f"eval.samples = {self.samples} with eval.temperature = {self.temperature}: greedy decoding "
                "gives equal samples, expected a temperature above 0 or one sample"
            )
