"""Stopping on request: SIGTERM, Ctrl-C or a used-up budget ends the run after the step in hand, saved."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from absl import logging

from fp4rl_jax.parallel import largest


class StopRequest:
    """Whether the process has been asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.by: str | None = None

    def agreed(self) -> str | None:
        """The signal that asks all processes of the run to stop after this step, or None.

        Signals reach processes at different times; every process calls this once a step, and where one has
        been asked all stop.
        """
        number = largest(0 if self.by is None else signal.Signals[self.by].value)
        return signal.Signals(number).name if number else None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: notes the request; a second Ctrl-C interrupts at once."""
        if self.by == "SIGINT" and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name
        logging.warning("%s: finishing this step, then saving and stopping", self.by)


@contextmanager
def stop_on_signals(seconds: float | None = None) -> Iterator[StopRequest]:
    """Handles SIGTERM and SIGINT by a StopRequest while the block runs.

    Args:
        seconds: wall clock after which SIGALRM asks, too; None leaves that signal alone.
    """
    request = StopRequest()
    asking = [signal.SIGTERM, signal.SIGINT, *([] if seconds is None else [signal.SIGALRM])]
    before = {number: signal.signal(number, request) for number in asking}
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield request
    finally:
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
