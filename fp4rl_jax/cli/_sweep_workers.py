"""Runs of a sweep in processes of their own, several at a time, which share the device.

This process uses no device meanwhile: it says who is started when, and notes what became of them.
"""

import dataclasses
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, Self

from fp4rl_jax.cli import _sweep_matrix
from fp4rl_jax.cli._sweep_failures import Failure, failure
from fp4rl_jax.cli._sweep_matrix import Cell
from fp4rl_jax.cli._sweep_progress import Runs
from fp4rl_jax.cli._sweep_sharing import Sharing
from fp4rl_jax.loop.stop import StopRequest
from fp4rl_jax.runs import exit_codes
from fp4rl_jax.runs.errors import storage_errors

#: Seconds between two looks at the processes.
LOOK_SECONDS = 0.1
#: Before a line by which a subcommand says why it failed.
SAID = "fp4rl sweep: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers:
    """How runs are spread over processes.

    Attributes:
        count: how many at a time.
        command: what runs one of them, but for `--only RUN --lifeline DESCRIPTOR`.
    """

    count: int
    command: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """The process of a run.

    Attributes:
        cell: the run.
        process: what runs it.
        log: the file of its output, and of those before it.
        start: bytes of that file that were there before.
    """

    cell: Cell
    process: subprocess.Popen[bytes]
    log: Path
    start: int

    def outcome(self, stop: StopRequest) -> Literal["finished", "left"] | Failure:
        """What its end means; if somebody else asked it to stop, all are asked, as without workers."""
        code = self.process.returncode
        if code == exit_codes.OK:
            return "finished"
        if code == exit_codes.SAVED_PLEASE_RESTART:
            stop.by = stop.by or "SIGTERM"
            return "left"
        if stop.by and code == -signal.SIGTERM:
            return "left"  # it was not yet so far that it could answer
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals else f"signal {-code}"
            message = f"ended by {name}, its last line {self.last_line!r}"
            return failure(self.cell, code=128 - code, message=message)
        if code not in exit_codes.MEANINGS:
            return failure(self.cell, code=code, message=f"unknown code, last line {self.last_line!r}")
        return failure(self.cell, code=code, message=self.last_line.removeprefix(SAID))

    @property
    def last_line(self) -> str:
        """The last line of its output that is not blank, or nothing."""
        with open(self.log, "rb") as file:
            file.seek(self.start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")


def in_order(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """First keys of all arms and factors before second ones, and so on.

    A run that begins before another of its arm and factors has compiled their programs compiles them, too.
    """
    counts: Counter[_sweep_matrix.Group] = Counter()
    ranks = {}
    for cell in cells:
        ranks[cell.name] = counts[cell.group]
        counts[cell.group] += 1
    return tuple(sorted(cells, key=lambda cell: ranks[cell.name]))  # stable


def startable(waiting: Sequence[Cell], running: Collection[str]) -> Cell | None:
    """The first that does not wait for the policy of a run that waits or runs itself."""
    unfinished = {cell.name for cell in waiting} | set(running)
    return next((cell for cell in waiting if not cell.source or cell.source.name not in unfinished), None)


def run_left(
    cells: Sequence[Cell],
    workers: Workers,
    root: Path,
    *,
    failed: dict[str, Failure],
    stop: StopRequest,
    shown: Runs,
) -> str | None:
    """Runs cells until all have ended or a stop is asked for; notes failures in `failed`.

    Args:
        cells: those that are neither done nor have failed, in the order in which they are to begin.
        workers: how many at a time, and by which command.
        root: the sweep's folder.
        failed: by run.
        stop: what asks; the processes are asked by SIGTERM then, and waited for.
        shown: where runs are counted.

    Returns:
        What asked for a stop, or None where nothing is left to run.

    Raises:
        StorageError: the root cannot be written.
    """
    waiting, ended = list(cells), []
    with _Pool(workers, root) as pool:
        while pool.running or (waiting and not stop.by):
            _start(waiting, pool, stop, shown)
            if stop.by:
                pool.ask()
            for worker in pool.ended():
                found = worker.outcome(stop)
                ended.append(found)
                if isinstance(found, Failure):
                    failed[worker.cell.name] = found
                    shown.message(f"{worker.cell.name} failed (exit code {found.code}): {found.message}")
                shown.end("failed" if isinstance(found, Failure) else found)
            shown.show()
            time.sleep(LOOK_SECONDS)
    return stop.by if waiting or "left" in ended else None


def _start(waiting: list[Cell], pool: "_Pool", stop: StopRequest, shown: Runs) -> None:
    """Starts what there is room for and takes it out of `waiting`, unless a stop is asked for."""
    while not stop.by:
        cell = startable(waiting, pool.running)
        if cell is None or not pool.has_room(cell):
            return
        waiting.remove(cell)
        pool.start(cell)
        shown.begin()


class _Pool:
    """The running processes; a context at whose end none of them is left.

    Each holds one end of a pipe whose other end this process holds: however it ends, they notice.
    """

    def __init__(self, workers: Workers, root: Path) -> None:
        self._workers, self._root, self._asked = workers, root, False
        self._sharing = Sharing(root)
        self._running: dict[str, Worker] = {}
        # Preallocated memory would be one process's alone.
        self._environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        self._theirs, self._mine = os.pipe()

    @property
    def running(self) -> Collection[str]:
        """The names of the runs whose processes have not ended."""
        return self._running.keys()

    def has_room(self, cell: Cell) -> bool:
        """Whether its slots are free; a run that wants more than there are runs alone."""
        taken = sum(worker.cell.slots for worker in self._running.values())
        return not taken or taken + cell.slots <= self._workers.count

    def start(self, cell: Cell) -> None:
        """Starts the process of a run; it writes into ROOT/RUN.log, behind what an earlier one wrote."""
        if _sweep_matrix.progress(cell).state == "to do":
            self._sharing.begin_anew(cell.name)
        self._sharing.note([*self._running, cell.name])
        path = self._root / f"{cell.name}.log"
        with storage_errors(path, doing="open a run's output"):
            out = open(path, "ab")
        with out:
            start = out.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [*self._workers.command, f"--only={cell.name}", f"--lifeline={self._theirs}"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=[self._theirs],
                process_group=0,  # a terminal's Ctrl-C is for this process, which asks them
            )
        self._running[cell.name] = Worker(cell=cell, process=process, log=path, start=start)

    def ask(self) -> None:
        """Asks all of them, once, to save and stop."""
        if not self._asked:
            for worker in self._running.values():
                worker.process.terminate()
        self._asked = True

    def ended(self) -> list["Worker"]:
        """Those that have ended since the last call."""
        found = [worker for worker in self._running.values() if worker.process.poll() is not None]
        for worker in found:
            del self._running[worker.cell.name]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._running.values():
            worker.process.kill()  # a run that is killed at any instant is resumed
            worker.process.wait()
        os.close(self._theirs)
        os.close(self._mine)
