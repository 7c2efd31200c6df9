"""Progress of a run: a bar on a terminal, a plain line a step elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import IO, Any, Literal, Protocol

from fp4rl_jax.runs.errors import missing_extra

_SHOWN = ("reward_mean", "mismatch_kl", "logprob_gap_max", "tokens_per_second")


class Progress(Protocol):
    """What the loop tells its user's terminal."""

    def advance(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `step` is done."""
        ...

    def message(self, text: str) -> None:
        """Prints a line that stays."""
        ...

    def close(self) -> None:
        """Leaves the terminal as a plain one."""
        ...


def make_progress(
    mode: Literal["auto", "bar", "lines", "off"], *, total: int, start: int = 0, stream: IO[str] | None = None
) -> Progress:
    """The progress display of a run.

    Args:
        mode: "auto" is "bar" on a terminal and "lines" elsewhere.
        total: steps that the run will have had at its end.
        start: steps done already.
        stream: where to write; standard error by default.

    Raises:
        MissingExtraError: a bar is wanted and rich is not installed.
    """
    out = sys.stderr if stream is None else stream
    if out is None or mode == "off":  # a process may have no standard error at all
        return _Lines(total, start, None)
    if mode == "bar" or (mode == "auto" and out.isatty()):
        return _Bar(total, start, out)
    return _Lines(total, start, out)


def summary(metrics: Mapping[str, Any]) -> str:
    """The few numbers of a step that fit on a line; those that are absent are left out."""
    shown = [(key, metrics[key]) for key in _SHOWN if isinstance(metrics.get(key), int | float)]
    return "  ".join(f"{key} {value:.4g}" for key, value in shown)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Rate:
    """Seconds a step and the time left, from the steps seen so far, the first one apart.

    The first step's time holds what compiles and evaluates before it: it says nothing of those to come.
    """

    def __init__(self, total: int, start: int):
        self._total, self._done, self._first = total, start, start
        self._began = self._settled = time.monotonic()

    def advance(self, step: int) -> None:
        """Notes that `step` is done."""
        self._done = step + 1
        if self._done == self._first + 1:
            self._settled = time.monotonic()

    @property
    def step_seconds(self) -> float:
        """Mean wall-clock seconds of a step."""
        steps, since = self._done - self._first, self._began
        if steps > 1:
            steps, since = steps - 1, self._settled
        return (time.monotonic() - since) / max(steps, 1)

    @property
    def left(self) -> str:
        """The time left as h:mm:ss."""
        return clock(self.step_seconds * max(self._total - self._done, 0))

    @property
    def pace(self) -> str:
        """Both, as they are shown; the first step's seconds alone while there is no other."""
        if self._done == self._first + 1:
            return f"first step after {self.step_seconds:.1f} s"
        return f"{self.step_seconds:.2f} s/step  {self.left} left"


class _Lines:
    """One plain line a step."""

    def __init__(self, total: int, start: int, stream: IO[str] | None):
        self._total, self._stream, self._rate = total, stream, Rate(total, start)

    def advance(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._rate.advance(step)
        self.message(f"step {step + 1}/{self._total}  {summary(metrics)}  {self._rate.pace}")

    def message(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """A rich bar with rate, time left and the step's main numbers."""

    def __init__(self, total: int, start: int, stream: IO[str]):
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        except ImportError:
            raise missing_extra("rich", extra="run", purpose="a progress bar") from None
        self._rate = Rate(total, start)
        self._bar = Progress(
            TextColumn("[bold]step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TextColumn("{task.fields[numbers]}"),
            console=Console(file=stream),
        )
        self._task = self._bar.add_task("step", total=total, completed=start, pace="", numbers="")
        self._bar.start()

    def advance(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._rate.advance(step)
        self._bar.update(self._task, completed=step + 1, pace=self._rate.pace, numbers=summary(metrics))

    def message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()
