"""What a report reads of a run's folder, as plain values; every part may be missing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp4rl_jax.runs.directory import CONFIG, EVALS, MANIFEST, METRICS, TRANSCRIPTS, config_differences
from fp4rl_jax.runs.errors import RunNotFoundError
from fp4rl_jax.runs.files import read_json, read_lines


@dataclass(frozen=True)
class RunData:
    """One run as read from disk.

    Attributes:
        label: how pictures and tables call it.
        path: its folder.
        config: config.json, or empty.
        manifest: manifest.json, or empty.
        metrics: one record a step.
        evals: evaluation records.
        transcripts: sampled completions.
    """

    label: str
    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    transcripts: list[dict[str, Any]] = field(default_factory=list)

    def keys(self) -> list[str]:
        """Metrics keys with at least one finite number, sorted."""
        found = {key for record in self.metrics for key, value in record.items() if _is_number(value)}
        return sorted(found - {"step"})

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """([S] int64 steps, [S] float64 values) of the lines that have the key; NaN where it is null."""
        rows = [(record["step"], record[key]) for record in self.metrics if key in record]
        steps = np.array([step for step, _ in rows], np.int64)
        values = np.array([value if _is_number(value) else np.nan for _, value in rows], np.float64)
        return steps, values

    def nonfinite_steps(self, key: str) -> list[int]:
        """Steps in which the key was NaN or infinite."""
        return [record["step"] for record in self.metrics if key in record.get("nonfinite", ())]


def load(paths: list[Path]) -> list[RunData]:
    """Reads the runs, labelled by folder name, or by path where two names are equal.

    Raises:
        RunNotFoundError: a folder holds no run.
        RecordError: a file of it is damaged.
    """
    names = [path.resolve().name for path in paths]
    return [
        _load_one(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]


def _load_one(path: Path, label: str) -> RunData:
    if not (path / CONFIG).exists() and not (path / METRICS).exists():
        raise RunNotFoundError(f"{path} holds no run: neither {CONFIG} nor {METRICS} is there")
    return RunData(
        label=label,
        path=path,
        config=read_json(path / CONFIG) if (path / CONFIG).exists() else {},
        manifest=read_json(path / MANIFEST) if (path / MANIFEST).exists() else {},
        metrics=read_lines(path / METRICS),
        evals=read_lines(path / EVALS),
        transcripts=read_lines(path / TRANSCRIPTS),
    )


def differing_keys(runs: list[RunData]) -> list[str]:
    """Dotted configuration keys in which any run differs from the first, the run's own name apart."""
    found: set[str] = set()
    for run in runs[1:]:
        found |= {key for key, _, _ in config_differences(runs[0].config, run.config)}
    return sorted(found - {"run.name", "run.root", "run.resume", "run.progress"})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
