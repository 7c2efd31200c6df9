"""Runs the cells of a sweep one after another, until they are done or the budget is."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fp4rl_jax.cli import _failures, _sweep_matrix, _sweep_policy
from fp4rl_jax.cli._sweep_matrix import Cell
from fp4rl_jax.cli.train import train
from fp4rl_jax.config import as_dict
from fp4rl_jax.loop.stop import StopRequest, stop_on_signals
from fp4rl_jax.runs import exit_codes, make_progress
from fp4rl_jax.runs.directory import config_fingerprint
from fp4rl_jax.runs.errors import storage_errors
from fp4rl_jax.runs.files import dump_json, read_json, write_atomically

FAILURES, PROGRAMS = "failures.json", ".jax_cache"
#: Failures that lie outside of an arm: the next call tries again.
PASSING = (exit_codes.RUN, exit_codes.STORAGE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ended before its end.

    Attributes:
        code: as `fp4rl train` would have returned. message: its line.
        fingerprint: of the configuration that failed.
    """

    code: int
    message: str
    fingerprint: str


def run_cells(
    cells: Sequence[Cell], root: Path, *, seconds: float | None
) -> tuple[str | None, dict[str, Failure]]:
    """Runs what is neither done nor has failed, in the order given.

    Args:
        cells: of one sweep.
        root: its folder; failures are kept in it.
        seconds: budget, wall clock, or None.

    Returns:
        What asked for a stop ("SIGALRM": the budget is used up) or None where nothing is left to run, and
        what has failed, by run, in this call or an earlier one.

    Raises:
        StorageError: the root cannot be written.
    """
    with storage_errors(root, doing="make the sweep's folder"):
        root.mkdir(parents=True, exist_ok=True)
    keep_programs(root)
    failed = failures(cells, root)
    shown = _Shown(cells)
    try:
        with stop_on_signals(seconds) as stop:
            return _run_left(cells, failed, stop, shown), failed
    finally:
        shown.close()
        _keep(failed, root)


def _run_left(
    cells: Sequence[Cell], failed: dict[str, Failure], stop: StopRequest, shown: "_Shown"
) -> str | None:
    """Runs what is left, notes failures in `failed`; what asked for a stop, or None."""
    last = None
    for number, cell in enumerate(cells):
        if cell.name in failed or _sweep_matrix.progress(cell).state == "done":
            continue
        asked = stop.agreed()
        if asked:
            return asked
        if last not in (None, cell.group):
            jax.clear_caches()  # the programs of another arm are of no more use, and hold memory
        last = cell.group
        shown.begin(number)
        ended = _run(cell, stop, shown)
        if isinstance(ended, Failure):
            failed[cell.name] = ended
            shown.message(f"{cell.name} failed (exit code {ended.code}): {ended.message}")
        elif ended == exit_codes.SAVED_PLEASE_RESTART:
            return stop.agreed()
    return None


def _run(cell: Cell, stop: StopRequest, shown: "_Shown") -> int | Failure:
    """Runs one cell to its end or to a stop; its exit code, or why it failed."""
    try:
        if cell.source is not None:
            return _sweep_policy.evaluate(cell, cell.source, shown)
        return train(cell.config, stop=stop, progress=shown)
    except (*_failures.expected(), jax.errors.JaxRuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = isinstance(error, tuple(_failures.expected()))
        return Failure(
            code=_failures.code_of(error) if known else exit_codes.FAILURE,
            message="; ".join(lines) if known else f"{type(error).__name__}: {lines[0] if lines else ''}",
            fingerprint=config_fingerprint(as_dict(cell.config)),
        )


def failures(cells: Sequence[Cell], root: Path) -> dict[str, Failure]:
    """The kept failures of these cells, by run; those of a cell that was changed since are left out."""
    found = read_json(root / FAILURES) if (root / FAILURES).exists() else {}
    kept = {name: Failure(**one) for name, one in found.items()}
    prints = {cell.name: config_fingerprint(as_dict(cell.config)) for cell in cells if cell.name in kept}
    return {name: one for name, one in kept.items() if prints.get(name) == one.fingerprint}


def forget_failures(root: Path) -> None:
    """Lets every failed run be tried again."""
    (root / FAILURES).unlink(missing_ok=True)


def _keep(failed: Mapping[str, Failure], root: Path) -> None:
    """Keeps the failures that the next call would only repeat; see `forget_failures`."""
    kept = {name: dataclasses.asdict(one) for name, one in failed.items() if one.code not in PASSING}
    write_atomically(root / FAILURES, dump_json(kept))


def keep_programs(root: Path) -> None:
    """Keeps compiled programs under the root, unless jax was told where to keep them."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str((root / PROGRAMS).absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


class _Shown:
    """One display for all runs of a sweep: steps of the whole matrix, and a line where a run begins."""

    def __init__(self, cells: Sequence[Cell]):
        self._names = [cell.name for cell in cells]
        self._totals = [cell.steps for cell in cells]
        self._done = [min(_sweep_matrix.progress(cell).steps, cell.steps) for cell in cells]
        mode = cells[0].config.run.progress
        self._shown = make_progress(mode, total=sum(self._totals), start=sum(self._done))
        self._before = 0

    def begin(self, number: int) -> None:
        """Says that the run at `number` of the matrix begins."""
        self._before = sum(self._totals[:number]) + sum(self._done[number + 1 :])
        at = f" from step {self._done[number]}" if self._done[number] else ""
        self.message(f"run {number + 1}/{len(self._names)}: {self._names[number]}{at}")

    def advance(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._shown.advance(self._before + step, metrics)

    def message(self, text: str) -> None:
        self._shown.message(text)

    def close(self) -> None:
        self._shown.close()
