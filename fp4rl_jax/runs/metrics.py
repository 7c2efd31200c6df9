"""The metrics of a run: one JSON object a step, and TensorBoard events beside it."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fp4rl_jax.runs.errors import RecordError, missing_extra
from fp4rl_jax.runs.files import JsonLines, strict_record


class MetricsWriter:
    """Appends one object a step to `metrics.jsonl`, and scalars to TensorBoard.

    Args:
        folder: the run's folder.
        start: the next step to be written; TensorBoard drops what it holds from there on.
        tensorboard: "on" needs the extra `run`.

    Attributes:
        last: the object written last, or empty.

    Raises:
        MissingExtraError: TensorBoard is on and tensorboardX is not installed.
    """

    def __init__(self, folder: Path, *, start: int = 0, tensorboard: Literal["on", "off"] = "on"):
        self._lines = JsonLines(folder / "metrics.jsonl")
        self._next = start
        self.last: dict[str, Any] = {}
        self._board = _board(folder / "tensorboard", start) if tensorboard == "on" else None

    def write(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the metrics of `step`; on the disk when it returns.

        Args:
            step: the step just done; each must be larger than the one before.
            values: numbers (Python's or 0-d arrays) and strings by documented key.

        Returns:
            The object as written: plain values, non-finite ones null and listed in `nonfinite`.

        Raises:
            RecordError: the step does not follow, or a value is neither number nor string.
            StorageError: the disk refused; the lines before are kept.
        """
        if step < self._next:
            raise RecordError(f"metrics of step {step} come after those of step {self._next - 1}")
        record = strict_record({"step": step, **values})
        self._lines.append(record)
        self._next = step + 1
        self.last = record
        if self._board is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, int | float):
                    self._board.add_scalar(key, value, step)
            self._board.flush()
        return record

    def close(self) -> None:
        """Closes both files."""
        self._lines.close()
        if self._board is not None:
            self._board.close()


def _board(folder: Path, start: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise missing_extra("tensorboardX", extra="run", purpose='run.tensorboard = "on"') from None
    return SummaryWriter(str(folder), purge_step=start or None, filename_suffix=f".{time.time_ns()}")
