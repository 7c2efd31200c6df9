"""The `run` section of a configuration: where a run lives and what it leaves behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.runs.catalogue import CATALOGUE, find


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and what it keeps.

    Attributes:
        name: the folder's name under `root`.
        root: the folder that holds the runs.
        seed: root of every random key of the run.
        resume: "never" refuses a folder that already holds a run; "auto" continues one that is
            there and starts one that is not; "must" refuses a folder that holds none.
        checkpoint_every: steps between checkpoints; 0 saves at the end and on a signal only.
        keep_last: how many of the latest checkpoints to keep, at least 1.
        keep_best: metrics key whose highest value marks one more checkpoint to keep; "" is none.
        transcripts_every: steps between sampled transcripts; 0 writes none.
        transcripts_per_step: completions written each time.
        tensorboard: "on" also writes TensorBoard events (extra `run`).
        progress: "auto" is a bar on a terminal and plain lines elsewhere.
    """

    name: str = "run"
    root: str = "runs"
    seed: int = 0
    resume: Literal["never", "auto", "must"] = "never"
    checkpoint_every: int = 0
    keep_last: int = 2
    keep_best: str = ""
    transcripts_every: int = 1
    transcripts_per_step: int = 4
    tensorboard: Literal["on", "off"] = "on"
    progress: Literal["auto", "bar", "lines", "off"] = "auto"

    def validate(self, root: Any) -> None:
        """Checks the section; ValueError naming the dotted key."""
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"run.name must be one folder name, got {self.name!r}")
        if self.keep_last < 1:
            raise ValueError(f"run.keep_last must be at least 1, got {self.keep_last}")
        if self.keep_best and find(self.keep_best) is None:
            raise unknown_name("run.keep_best", self.keep_best, (metric.key for metric in CATALOGUE))
        for field in ("checkpoint_every", "transcripts_every", "transcripts_per_step"):
            if getattr(self, field) < 0:
                raise ValueError(f"run.{field} must be 0 or more, got {getattr(self, field)}")

    @property
    def path(self) -> Path:
        """The run's folder."""
        return Path(self.root) / self.name
