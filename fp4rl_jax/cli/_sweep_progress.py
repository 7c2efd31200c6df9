"""What a sweep shows while it runs: steps of the whole matrix, or how many of its runs are where."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal

from fp4rl_jax.cli import _sweep_matrix
from fp4rl_jax.cli._sweep_matrix import Cell
from fp4rl_jax.runs import make_progress
from fp4rl_jax.runs.progress import clock


class Steps:
    """One display for runs one after another: steps of the whole matrix, and a line where a run begins."""

    def __init__(self, cells: Sequence[Cell]):
        self._names = [cell.name for cell in cells]
        self._totals = [cell.steps for cell in cells]
        self._done = [min(_sweep_matrix.progress(cell).steps, cell.steps) for cell in cells]
        mode = cells[0].config.run.progress if cells else "off"
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


class Runs:
    """One line on runs that go side by side: rewritten in place on a terminal, else printed where it changes.

    Args:
        mode: as `make_progress`.
        finished: runs that were finished before this call.
        failed: runs that had failed before it and are not tried again.
        left: runs that are neither.
        stream: where to write; standard error by default.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "lines", "off"],
        *,
        finished: int,
        failed: int,
        left: int,
        stream: IO[str] | None = None,
    ):
        out = sys.stderr if stream is None else stream
        self._stream = None if mode == "off" else out
        self._in_place = out is not None and (mode == "bar" or (mode == "auto" and out.isatty()))
        self._finished, self._failed, self._left, self._running = finished, failed, left, 0
        self._before, self._began, self._last = finished + failed, time.monotonic(), ""

    def begin(self) -> None:
        """Notes that a run has begun."""
        self._left, self._running = self._left - 1, self._running + 1

    def end(self, how: Literal["finished", "failed", "left"]) -> None:
        """Notes what became of a running run."""
        self._running -= 1
        self._finished += how == "finished"
        self._failed += how == "failed"
        self._left += how == "left"

    def line(self, seconds: float) -> str:
        """The line, `seconds` after the call began.

        The time to go is that of the runs that have ended in this call, spread over those that have not.
        """
        ended = self._finished + self._failed - self._before
        togo = clock(seconds * (self._running + self._left) / ended) if ended else "?"
        return f"{self._counts()}; {clock(seconds)} elapsed, about {togo} to go"

    def _counts(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._finished} finished{failed}, {self._running} running, {self._left} left"

    def show(self) -> None:
        """Shows the line as it is now."""
        line = self.line(time.monotonic() - self._began)
        if self._in_place and line != self._last:
            self._write(f"\r\x1b[K{line}")
        elif not self._in_place and self._counts() != self._last:
            self._write(line + "\n")
        self._last = line if self._in_place else self._counts()

    def message(self, text: str) -> None:
        """Prints a line that stays."""
        self._write(f"\r\x1b[K{text}\n" if self._in_place else text + "\n")
        self._last = "" if self._in_place else self._last

    def close(self) -> None:
        """Leaves the terminal as a plain one."""
        if self._in_place and self._last:
            self._write("\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            print(text, end="", file=self._stream, flush=True)
