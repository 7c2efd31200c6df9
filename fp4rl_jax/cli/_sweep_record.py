"""What a sweep leaves behind as plain values: the courses of its runs, for table and picture."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4rl_jax.cli._sweep_failures import Failure
from fp4rl_jax.cli._sweep_file import ArmSection, SweepSection
from fp4rl_jax.cli._sweep_matrix import Cell, progress
from fp4rl_jax.cli._sweep_sharing import Sharing
from fp4rl_jax.configuring import build, to_plain
from fp4rl_jax.runs.directory import CONFIG
from fp4rl_jax.runs.errors import RecordError
from fp4rl_jax.runs.files import read_json
from fp4rl_jax.runs.report.data import RunData, load
from fp4rl_jax.runs.report.evals import EvalPoint, pass_points
from fp4rl_jax.runs.report.panels import panel_of, panel_series

#: Of a record's file. The first had neither digests, nor what each run was made on and shared.
FORMAT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of the matrix.

    Attributes:
        name, arm, key: as the matrix has them. factors: value as text by dotted key.
        digest: of the configuration, as `Cell.digest`.
        state: "to do", "partial", "done", "other config" or "failed". message: of a failure.
        steps: done of `total`.
        made: `date`, `device`, `jax` of its latest start; empty before there is one.
        shared: how many runs of the sweep shared the device while it ran, at most; 1 of a run alone.
        courses: by metrics key, [step, value] pairs to six digits, the value null where it was not finite.
        before, after: pass@1 [value, low, high] with its own 95 % interval, or None.
    """

    name: str
    arm: str
    key: int
    factors: dict[str, str]
    digest: str
    state: str
    steps: int
    total: int
    message: str = ""
    made: dict[str, str] = dataclasses.field(default_factory=dict)
    shared: int = 1
    courses: dict[str, list[list[float | None]]] = dataclasses.field(default_factory=dict)
    before: list[float] | None = None
    after: list[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A sweep and its runs.

    Attributes:
        sweep: the file, with what the command line said instead.
        runs: in the order of the matrix.
        keys: of all its configurations, dotted: those that the digests count. Empty in a record that was
            made before records had them: its digests count every key there is.
    """

    sweep: SweepSection
    runs: tuple[RunRecord, ...]
    keys: tuple[str, ...] = ()

    def arm(self, name: str) -> ArmSection:
        """The arm of that name."""
        return next(arm for arm in self.sweep.arms if arm.name == name)


def of_folders(
    sweep: SweepSection,
    cells: Sequence[Cell],
    failed: Mapping[str, Failure],
    *,
    recorded: Mapping[str, RunRecord],
) -> SweepRecord:
    """Reads the runs of a sweep; those of an earlier record are taken from there.

    Args:
        sweep: the file.
        cells: its runs.
        failed: by run.
        recorded: by run, as `finished_in` found them.

    Raises:
        RecordError: a file of a run is damaged.
    """
    sharing = Sharing(Path(sweep.root))
    runs = [
        recorded[cell.name] if cell.name in recorded else _run(cell, sweep, failed.get(cell.name), sharing)
        for cell in cells
    ]
    keys = sorted({key for cell in cells for key in cell.settings})
    return SweepRecord(sweep=sweep, runs=tuple(runs), keys=tuple(keys))


def finished_in(record: SweepRecord, sweep: SweepSection, cells: Sequence[Cell]) -> dict[str, RunRecord]:
    """By name, the runs that need not be run: of the same configuration in the record, and not done here.

    The record may have been made elsewhere, and of another sweep, in which the same configuration is an arm
    of another name. What it did not keep of a run that `sweep` shows makes it another run. A key that has
    come since it was made does not, where it has its default.
    """
    done = {
        run.digest: run
        for run in record.runs
        if run.state == "done" and run.courses.keys() >= {*sweep.courses}
    }
    known = frozenset(record.keys) or None
    digests = {cell.name: cell.digest_among(known) for cell in cells}
    left = [cell for cell in cells if digests[cell.name] in done and progress(cell).state != "done"]
    return {
        cell.name: dataclasses.replace(
            done[digests[cell.name]],
            name=cell.name,
            arm=cell.group.arm,
            factors=dict(cell.group.factors),
            digest=cell.digest,
        )  # fmt: skip
        for cell in left
    }


def dump(record: SweepRecord) -> bytes:
    """The record as a file holds it, a run a line; `parse` takes it back."""
    runs = [_line(dataclasses.asdict(run)) for run in record.runs]
    facts = {"format": FORMAT, "sweep": to_plain(record.sweep), "keys": record.keys}
    parts = [*(f'"{name}": {_line(fact)}' for name, fact in facts.items()), '"runs": [']
    return ("{\n" + ",\n".join(parts) + "\n" + ",\n".join(runs) + "\n]\n}\n").encode()


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse(path: Path) -> SweepRecord:
    """The record that a file holds.

    Raises:
        RecordError: it is missing, no JSON, no record of a sweep, or one of another format.
        ConfigError: its sweep is not understood.
    """
    plain = read_json(path)
    if not isinstance(plain, dict) or not {"sweep", "runs"} <= set(plain):
        raise RecordError(f"{path} is no record of a sweep: expected the keys format, sweep and runs")
    found = plain.get("format", 1)
    if found != FORMAT:
        raise RecordError(
            f"{path} is a sweep's record of format {found}, expected {FORMAT}, which has the digests of its"
            " runs' configurations: a call of the sweep where its runs' folders are writes it anew"
        )
    runs = tuple(RunRecord(**run) for run in plain["runs"])
    keys = tuple(plain.get("keys", ()))
    return SweepRecord(sweep=build(SweepSection, plain["sweep"]), runs=runs, keys=keys)


def _data(cell: Cell) -> RunData | None:
    path = cell.config.run.path
    return load([path])[0] if (path / CONFIG).exists() else None


def _made(manifest: Mapping[str, Any]) -> dict[str, str]:
    if not manifest:
        return {}
    kinds = [device["kind"] for device in manifest["devices"]]
    return {
        "date": manifest["started"][:10],
        "device": f"{len(kinds)} x {kinds[0]}",
        "jax": manifest["versions"]["jax"],
    }


def _run(cell: Cell, sweep: SweepSection, failure: Failure | None, sharing: Sharing) -> RunRecord:
    at, data = progress(cell), _data(cell)
    common: dict[str, Any] = {
        "name": cell.name,
        "arm": cell.group.arm,
        "key": cell.key,
        "factors": dict(cell.group.factors),
        "digest": cell.digest,
        "state": at.state if failure is None else "failed",
        "steps": at.steps,
        "total": cell.steps,
        "message": at.difference if failure is None else f"exit code {failure.code}: {failure.message}",
    }
    if data is None:
        return RunRecord(**common)
    points = pass_points(data)
    return RunRecord(
        **common,
        made=_made(data.manifest),
        shared=sharing.count(cell.name),
        courses={key: _course(data, key) for key in sweep.courses},
        before=_point(points, 0),
        after=_point(points, cell.config.loop.steps),
    )


def _course(data: RunData, key: str) -> list[list[float | None]]:
    steps, values = panel_series(data, panel_of(key))
    pairs = zip(steps.tolist(), values.tolist(), strict=True)
    return [[step, None if value != value else float(f"{value:.6g}")] for step, value in pairs]


def _point(points: Sequence[EvalPoint], step: int) -> list[float] | None:
    found = [point for point in points if point.step == step]
    return [found[-1].value, found[-1].low, found[-1].high] if found else None
