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
    from fp4rl_jax.cli._sweep_record import SweepRecord

SUMMARY = "run a matrix of arms within a time budget, resumed by the next call; draw it and write the table"


def main(argv: Sequence[str]) -> int:
    """Runs what is not done yet, then draws and writes the table; see docs/SWEEP.md."""
    values = flags.FlagValues()
    _define_flags(values)
    words = _flags.parse(values, argv, name="sweep", summary=SUMMARY)
    if len(words) != 1:
        print(
            f"fp4rl sweep: expected one sweep file, got {len(words)}: {' '.join(words)}"
            " (e.g. fp4rl sweep configs/ci/sweep.toml)",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    file = Path(words[0])
    with _failures.settings():
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
    flags.DEFINE_string(
        "page", None, "also write the table and the picture into this page, as a section", flag_values=values
    )


def _run(file: Path, values: flags.FlagValues, page: Path | None) -> int:
    """Runs a sweep file; the exit code says whether anything is left or failed."""
    from fp4rl_jax.cli import _sweep_file, _sweep_matrix  # jax and the models load only now

    with _failures.settings():
        sweep = _overridden(_sweep_file.load(str(file)), values)
    cells = _sweep_matrix.expand(sweep)
    if values["dry_run"].value:
        print(_sweep_matrix.matrix(cells))
        return exit_codes.OK
    from fp4rl_jax.cli import _sweep_record, _sweep_results, _sweep_run

    root = Path(sweep.root)
    if values["failed"].value == "again":
        _sweep_run.forget_failures(root)
    asked, failed = _sweep_run.run_cells(cells, root, seconds=sweep.budget.seconds)
    record = _sweep_record.of_folders(sweep, cells, failed)
    _sweep_results.write(record, root)
    with _failures.settings():
        _show(record, page, name=file.stem)
    if asked is not None:
        print(f"{asked}: runs are left; the same command goes on", file=sys.stderr)
        return exit_codes.SAVED_PLEASE_RESTART
    return exit_codes.ARM if failed else exit_codes.OK


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
