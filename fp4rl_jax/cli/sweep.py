"""`fp4rl sweep FILE.toml`: runs a matrix of arms, within a time budget and over several calls."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from fp4rl_jax.cli import _failures, _flags
from fp4rl_jax.runs import exit_codes

if TYPE_CHECKING:
    from fp4rl_jax.cli._sweep_file import SweepSection
    from fp4rl_jax.cli._sweep_matrix import Cell
    from fp4rl_jax.cli._sweep_record import RunRecord, SweepRecord
    from fp4rl_jax.cli._sweep_workers import Workers

SUMMARY = "run a matrix of arms within a time budget, resumed by the next call; draw it and write the table"


def main(argv: Sequence[str]) -> int:
    """Runs what is not done yet, then draws and writes the table; see docs/SWEEP.md."""
    values = flags.FlagValues()
    _define_flags(values)
    words = _flags.parse(values, argv, name="sweep", summary=SUMMARY, words="FILE")
    if len(words) != 1:
        print(
            f"fp4rl sweep: expected one sweep file, got {len(words)}: {' '.join(words)}"
            " (e.g. fp4rl sweep configs/ci/sweep.toml)",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    file = Path(words[0])
    with _failures.settings():
        _require_together(values, file)
        page = _page(values)
        if file.suffix == ".json":
            from fp4rl_jax.cli import _sweep_record

            return _show(_sweep_record.parse(file), page, name=file.stem)
    return _run(file, values, page)


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("dry_run", False, "print the matrix and stop", flag_values=values)
    flags.DEFINE_multi_string("set", [], "key.path=value over every arm; repeatable", flag_values=values)
    flags.DEFINE_string(
        "root", None, "folder of the runs and results, instead of the file's", flag_values=values
    )
    flags.DEFINE_float("seconds", None, "budget of this call, instead of the file's", flag_values=values)
    flags.DEFINE_enum(
        "failed", "keep", ["keep", "again"], "whether runs that failed in an earlier call are tried again",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        "workers", 1, "runs at a time, each in a process of its own; they share the device", lower_bound=1,
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_multi_string(
        "into", [], "record (sweep.json) of an earlier call whose finished runs are kept, not run again;"
        " repeatable",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "only", None, "run the run of this name alone, and write no results", flag_values=values
    )
    flags.DEFINE_integer(
        "lifeline", None, "with --only: descriptor of a pipe; the run stops when its other end is closed",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string(
        "page", None, "also write the table and the picture into this page, as a section", flag_values=values
    )


def _require_together(values: flags.FlagValues, file: Path) -> None:
    """Refuses flags that say nothing beside one another."""
    results = [
        f"--{name}" for name in ("dry_run", "failed", "into", "workers", "page") if values[name].present
    ]
    if values["only"].present and results:
        raise ValueError(f"--only runs one run and writes no results: expected it without {results[0]}")
    if values["lifeline"].present and not values["only"].present:
        raise ValueError("--lifeline is of one run: expected it with --only")
    running = [f"--{name}" for name in ("into", "workers", "only") if values[name].present]
    if file.suffix == ".json" and running:
        raise ValueError(
            f"{file} is a record, of which nothing is run: expected a sweep file with {running[0]}"
        )


def _run(file: Path, values: flags.FlagValues, page: Path | None) -> int:
    """Runs a sweep file; the exit code says whether anything is left or failed."""
    from fp4rl_jax.cli import _sweep_file, _sweep_matrix  # jax and the models load only now

    with _failures.settings():
        sweep = _overridden(_sweep_file.load(str(file)), values)
    cells = _sweep_matrix.expand(sweep)
    recorded = _recorded(values, sweep, cells)
    if values["dry_run"].value:
        print(_sweep_matrix.matrix(cells, recorded))
        return exit_codes.OK
    from fp4rl_jax.cli import _sweep_failures, _sweep_record, _sweep_results, _sweep_run

    root, seconds = Path(sweep.root), sweep.budget.seconds
    if values["only"].value is not None:
        with _failures.settings():
            cell = _sweep_matrix.named(cells, _flags.get(values, "only", str))
        return _sweep_run.run_one(cell, root, seconds=seconds, lifeline=values["lifeline"].value)
    if values["failed"].value == "again":
        _sweep_failures.forget_failures(root)
    asked, failed = _sweep_run.run_cells(
        cells, root, seconds=seconds, elsewhere=recorded.keys(), workers=_workers(file, sweep, values)
    )
    record = _sweep_record.of_folders(sweep, cells, failed, recorded=recorded)
    _sweep_results.write(record, root)
    with _failures.settings():
        _show(record, page, name=file.stem)
    if asked is not None:
        print(f"{asked}: runs are left; the same command goes on", file=sys.stderr)
        return exit_codes.SAVED_PLEASE_RESTART
    return exit_codes.ARM if failed else exit_codes.OK


def _recorded(
    values: flags.FlagValues, sweep: "SweepSection", cells: "Sequence[Cell]"
) -> "dict[str, RunRecord]":
    """The runs that a record of `--into` has finished and this folder has not; says how many on stderr."""
    from fp4rl_jax.cli import _sweep_record

    recorded: dict[str, RunRecord] = {}
    for path in values["into"].value or ():
        with _failures.settings():
            record = _sweep_record.parse(Path(path))
        found = _sweep_record.finished_in(record, sweep, cells)
        done = [run.name for run in record.runs if run.state == "done"]
        print(
            f"{path}: {len(found)} of its {len(done)} finished runs are kept and not run here",
            file=sys.stderr,
        )
        recorded |= found
    return recorded


def _workers(file: Path, sweep: "SweepSection", values: flags.FlagValues) -> "Workers | None":
    """The processes that `--workers` asks for; each is this command with one run of the matrix."""
    count = _flags.get(values, "workers", int)
    if count == 1:
        return None
    from fp4rl_jax.cli._sweep_workers import Workers

    words = [f"--set={word}" for word in values["set"].value or ()]
    words += [f"--root={sweep.root}"]
    words += [] if values["seconds"].value is None else [f"--seconds={sweep.budget.seconds}"]
    return Workers(count=count, command=(sys.executable, "-m", "fp4rl_jax", "sweep", str(file), *words))


def _overridden(sweep: "SweepSection", values: flags.FlagValues) -> "SweepSection":
    """The sweep with what the flags say instead; ValueError naming a value that it refuses."""
    from fp4rl_jax.cli._sweep_file import BudgetSection

    changes: dict[str, Any] = {"set": (*sweep.set, *(values["set"].value or ()))}
    if values["root"].value is not None:
        changes["root"] = _flags.get(values, "root", str)
    if values["seconds"].value is not None:
        changes["budget"] = BudgetSection(seconds=_flags.get(values, "seconds", float))
    return dataclasses.replace(sweep, **changes)


def _page(values: flags.FlagValues) -> Path | None:
    """The page to write into; refused now and not when the work is done."""
    if values["page"].value is None:
        return None
    page = Path(_flags.get(values, "page", str))
    if not page.is_file():
        raise ValueError(f"--page {page}: no such file, expected a page to write a section into")
    return page


def _show(record: "SweepRecord", page: Path | None, *, name: str) -> int:
    """Prints the table, and writes the page where one is asked for."""
    from fp4rl_jax.cli import _sweep_results, _sweep_table

    print(_sweep_table.markdown(record), end="")
    if page is not None:
        _sweep_results.write_page(record, page, name=name)
    return exit_codes.OK
