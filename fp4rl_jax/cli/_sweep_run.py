"""Runs the cells of a sweep until they are done or the budget is: one after another here, or by processes."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import jax

from fp4rl_jax.cli import (
    _failures,
    _sweep_failures,
    _sweep_finished,
    _sweep_matrix,
    _sweep_policy,
    _sweep_workers,
)
from fp4rl_jax.cli._sweep_failures import Failure
from fp4rl_jax.cli._sweep_matrix import Cell
from fp4rl_jax.cli._sweep_progress import Runs, Steps
from fp4rl_jax.cli._sweep_sharing import Sharing
from fp4rl_jax.cli._sweep_workers import SAID, Workers
from fp4rl_jax.cli.train import train
from fp4rl_jax.loop.stop import StopRequest, stop_on_signals
from fp4rl_jax.runs import exit_codes, make_progress
from fp4rl_jax.runs.errors import storage_errors
from fp4rl_jax.runs.progress import Progress

PROGRAMS = ".jax_cache"


def run_cells(
    cells: Sequence[Cell],
    root: Path,
    *,
    seconds: float | None,
    elsewhere: Collection[str] = (),
    workers: Workers | None = None,
) -> tuple[str | None, dict[str, Failure]]:
    """Runs what is neither done nor has failed.

    Args:
        cells: of one sweep.
        root: its folder; failures are kept in it.
        seconds: budget, wall clock, or None.
        elsewhere: names of runs that are finished, and not in this folder: they are not run.
        workers: None runs one after another in this process, in the order given; else processes run them,
            and this one uses no device.

    Returns:
        What asked for a stop ("SIGALRM": the budget is used up) or None where nothing is left to run, and
        what has failed, by run, in this call or an earlier one.

    Raises:
        StorageError: the root cannot be written.
    """
    with storage_errors(root, doing="make the sweep's folder"):
        root.mkdir(parents=True, exist_ok=True)
    keep_programs(root)
    begun = cells if workers is None else _sweep_workers.in_order(cells)
    here = [cell for cell in begun if cell.name not in elsewhere]
    for cell in here:
        if cell.keep == "results" and _sweep_matrix.progress(cell).state == "done":
            _keep_of(cell)
    failed = _sweep_failures.failures(here, root) | _without_policy(here, elsewhere)
    try:
        with stop_on_signals(seconds) as stop:
            if workers is None:
                return _run_left(here, root, failed=failed, stop=stop), failed
            return _run_by(workers, here, root, failed=failed, stop=stop), failed
    finally:
        _sweep_failures.keep(failed, root)


def _without_policy(cells: Sequence[Cell], elsewhere: Collection[str]) -> dict[str, Failure]:
    """The runs that would evaluate a policy which is in another folder, as failures that are not kept."""
    found = {}
    for cell in cells:
        away = cell.source is not None and cell.source.name in elsewhere
        if cell.source is not None and away and _sweep_matrix.progress(cell).state != "done":
            why = f"{cell.source.name} is finished in the earlier record alone: its policy is not here"
            found[cell.name] = _sweep_failures.failure(cell, code=exit_codes.RUN, message=why)
    return found


def _run_by(
    workers: Workers, cells: Sequence[Cell], root: Path, *, failed: dict[str, Failure], stop: StopRequest
) -> str | None:
    """Has processes run what is left, notes failures in `failed`; what asked for a stop, or None."""
    done = {cell.name for cell in cells if _sweep_matrix.progress(cell).state == "done"}
    left = [cell for cell in cells if cell.name not in done | failed.keys()]
    mode = cells[0].config.run.progress if cells else "off"
    runs = Runs(mode, finished=len(done), failed=len(failed), left=len(left))
    with contextlib.closing(runs) as shown:
        return _sweep_workers.run_left(left, workers, root, failed=failed, stop=stop, shown=shown)


def _run_left(
    cells: Sequence[Cell], root: Path, *, failed: dict[str, Failure], stop: StopRequest
) -> str | None:
    """Runs what is left, notes failures in `failed`; what asked for a stop, or None."""
    last, sharing = None, Sharing(root)
    with contextlib.closing(Steps(cells)) as shown:
        for number, cell in enumerate(cells):
            at = _sweep_matrix.progress(cell)
            if cell.name in failed or at.state == "done":
                continue
            asked = stop.agreed()
            if asked:
                return asked
            if last not in (None, cell.group):
                jax.clear_caches()  # the programs of another arm are of no more use, and hold memory
            last = cell.group
            if at.state == "to do":
                sharing.begin_anew(cell.name)
            shown.begin(number)
            ended = _run(cell, stop, shown)
            if isinstance(ended, Failure):
                failed[cell.name] = ended
                shown.message(f"{cell.name} failed (exit code {ended.code}): {ended.message}")
            elif ended == exit_codes.SAVED_PLEASE_RESTART:
                return stop.agreed()
    return None


def run_one(cell: Cell, root: Path, *, seconds: float | None, lifeline: int | None) -> int:
    """Runs one cell in this process, whatever it did before; its exit code, with a line where it failed.

    Args:
        cell: of a sweep.
        root: its folder; nothing but the run's folder and the programs is written.
        seconds: budget, wall clock, or None.
        lifeline: descriptor of a pipe; the end of all that could write into it asks as SIGTERM does.
    """
    keep_programs(root)
    start = min(_sweep_matrix.progress(cell).steps, cell.steps)
    shown = make_progress(cell.config.run.progress, total=cell.steps, start=start)
    with contextlib.closing(shown), stop_on_signals(seconds) as stop:
        if lifeline is not None:
            watch(lifeline)
        ended = _run(cell, stop, shown)
    if isinstance(ended, Failure):
        print(f"{SAID}{ended.message}", file=sys.stderr)
        return ended.code
    return ended


def _keep_of(cell: Cell) -> None:
    """Leaves of a finished run's folder what is to be kept."""
    if cell.keep == "results":
        _sweep_finished.give_up_checkpoints(cell.config.run.path, steps=cell.steps)


def watch(lifeline: int) -> None:
    """Sends this process SIGTERM once no process holds the other end of the pipe any more."""

    def ask_at_end() -> None:
        os.read(lifeline, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask_at_end, daemon=True).start()


def _run(cell: Cell, stop: StopRequest, shown: Progress) -> int | Failure:
    """Runs one cell to its end or to a stop; its exit code, or why it failed."""
    try:
        if cell.source is not None:
            return _sweep_policy.evaluate(cell, cell.source, shown)
        _sweep_finished.begin_anew(cell.config.run.path)
        ended = train(cell.config, stop=stop, progress=shown)
        if ended == exit_codes.OK:
            _keep_of(cell)
        return ended
    except (*_failures.expected(), jax.errors.JaxRuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        known = isinstance(error, tuple(_failures.expected()))
        return _sweep_failures.failure(
            cell,
            code=_failures.code_of(error) if known else exit_codes.FAILURE,
            message="; ".join(lines) if known else f"{type(error).__name__}: {lines[0] if lines else ''}",
        )


def keep_programs(root: Path) -> None:
    """Keeps compiled programs under the root, unless jax was told where to keep them."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str((root / PROGRAMS).absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
