"""What a sweep leaves behind as plain values: the courses of its runs, for table and picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4rl_jax.cli._sweep_file import ArmSection, SweepSection
from fp4rl_jax.cli._sweep_matrix import Cell, progress
from fp4rl_jax.cli._sweep_run import Failure
from fp4rl_jax.configuring import build, to_plain
from fp4rl_jax.runs.directory import CONFIG
from fp4rl_jax.runs.errors import RecordError
from fp4rl_jax.runs.files import read_json
from fp4rl_jax.runs.report.data import RunData, load
from fp4rl_jax.runs.report.evals import EvalPoint, pass_points
from fp4rl_jax.runs.report.panels import panel_of, panel_series

#: Courses that every record has.
COURSES = ("reward_mean", "mismatch_kl", "logprob_gap_max", "step_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of the matrix.

    Attributes:
        name, arm, key: as the matrix has them. factors: value as text by dotted key.
        state: "to do", "partial", "done", "other config" or "failed". message: of a failure.
        steps: done of `total`.
        courses: by metrics key, [step, value] pairs, the value null where it was not finite.
        before, after: pass@1 [value, low, high] with its own 95 % interval, or None.
    """

    name: str
    arm: str
    key: int
    factors: dict[str, str]
    state: str
    steps: int
    total: int
    message: str = ""
    courses: dict[str, list[list[float | None]]] = dataclasses.field(default_factory=dict)
    before: list[float] | None = None
    after: list[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A sweep and its runs.

    Attributes:
        sweep: the file, with what the command line said instead.
        made: `date`, `device`, `jax` of the latest run's manifest; empty before there is one.
        runs: in the order of the matrix.
    """

    sweep: SweepSection
    made: dict[str, str]
    runs: tuple[RunRecord, ...]

    def arm(self, name: str) -> ArmSection:
        """The arm of that name."""
        return next(arm for arm in self.sweep.arms if arm.name == name)


def of_folders(sweep: SweepSection, cells: Sequence[Cell], failed: Mapping[str, Failure]) -> SweepRecord:
    """Reads the runs of a sweep.

    Raises:
        RecordError: a file of a run is damaged.
    """
    found = [(cell, _data(cell)) for cell in cells]
    manifests = [data.manifest for _, data in found if data is not None and data.manifest]
    latest = max(manifests, key=lambda manifest: manifest["started"], default=None)
    runs = tuple(_run(cell, data, sweep, failed.get(cell.name)) for cell, data in found)
    return SweepRecord(sweep=sweep, made=_made(latest), runs=runs)


def dump(record: SweepRecord) -> dict[str, Any]:
    """The record as JSON holds it; `parse` takes it back."""
    runs = [dataclasses.asdict(run) for run in record.runs]
    return {"sweep": to_plain(record.sweep), "made": record.made, "runs": runs}


def parse(path: Path) -> SweepRecord:
    """The record that a file holds.

    Raises:
        RecordError: it is missing, no JSON, or no record of a sweep.
        ConfigError: its sweep is not understood.
    """
    plain = read_json(path)
    if not isinstance(plain, dict) or set(plain) != {"sweep", "made", "runs"}:
        raise RecordError(f"{path} is no record of a sweep: expected the keys sweep, made and runs")
    return SweepRecord(
        sweep=build(SweepSection, plain["sweep"]),
        made=plain["made"],
        runs=tuple(RunRecord(**run) for run in plain["runs"]),
    )


def _data(cell: Cell) -> RunData | None:
    path = cell.config.run.path
    return load([path])[0] if (path / CONFIG).exists() else None


def _made(manifest: Mapping[str, Any] | None) -> dict[str, str]:
    if manifest is None:
        return {}
    kinds = [device["kind"] for device in manifest["devices"]]
    return {
        "date": manifest["started"][:10],
        "device": f"{len(kinds)} x {kinds[0]}",
        "jax": manifest["versions"]["jax"],
    }


def _run(cell: Cell, data: RunData | None, sweep: SweepSection, failure: Failure | None) -> RunRecord:
    at = progress(cell)
    common: dict[str, Any] = {
        "name": cell.name,
        "arm": cell.group.arm,
        "key": cell.key,
        "factors": dict(cell.group.factors),
        "state": at.state if failure is None else "failed",
        "steps": at.steps,
        "total": cell.steps,
        "message": at.difference if failure is None else f"exit code {failure.code}: {failure.message}",
    }
    if data is None:
        return RunRecord(**common)
    points = pass_points(data)
    keys = dict.fromkeys((*COURSES, *sweep.draw, *sweep.columns))
    return RunRecord(
        **common,
        courses={key: _course(data, key) for key in keys},
        before=_point(points, 0),
        after=_point(points, cell.config.loop.steps),
    )


def _course(data: RunData, key: str) -> list[list[float | None]]:
    steps, values = panel_series(data, panel_of(key))
    pairs = zip(steps.tolist(), values.tolist(), strict=True)
    return [[step, None if value != value else value] for step, value in pairs]


def _point(points: Sequence[EvalPoint], step: int) -> list[float] | None:
    found = [point for point in points if point.step == step]
    return [found[-1].value, found[-1].low, found[-1].high] if found else None
