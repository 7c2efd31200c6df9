"""The metrics of a run: one JSON object a step, and TensorBoard events beside it."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fp4rl_jax.runs.errors import RecordError, missing_extra, storage_errors
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
        self._board = _Board(folder / "tensorboard", start) if tensorboard == "on" else None

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
        self._store(step, record)
        self._next = step + 1
        self.last = record
        return record

    def close(self) -> None:
        """Closes both files."""
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def _store(self, step: int, record: Mapping[str, Any]) -> None:
        self._lines.append(record)
        if self._board is not None:
            self._board.write(step, record)


class UnwrittenMetrics(MetricsWriter):
    """The metrics of a process that leaves the writing to process 0."""

    def __init__(self, *, start: int = 0):
        self._next = start
        self.last: dict[str, Any] = {}

    def close(self) -> None:
        """Nothing is open."""

    def _store(self, step: int, record: Mapping[str, Any]) -> None:
        pass


class _Board:
    """TensorBoard events, one a step with all its scalars, written by the calling thread.

    tensorboardX's `SummaryWriter` writes from a thread of its own behind a short queue: a disk that
    refuses kills that thread, and the next scalars wait for it for ever.
    """

    def __init__(self, folder: Path, start: int):
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError:
            raise missing_extra("tensorboardX", extra="run", purpose='run.tensorboard = "on"') from None
        self._events: Any = event_pb2  # generated modules: their names exist at run time only
        self._summaries: Any = summary_pb2
        self._folder, self._closed = folder, False
        with storage_errors(folder, doing="write TensorBoard events"):
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), filename_suffix=f".{time.time_ns()}")
            if start:  # tells TensorBoard to forget what earlier files hold from this step on
                session = self._events.SessionLog(status=self._events.SessionLog.START)
                self._write(step=start, session_log=session)
            self._writer.flush()

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        scalars = {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}
        values = [
            self._summaries.Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()
        ]
        with storage_errors(self._folder, doing="write TensorBoard events"):
            self._write(step=step, summary=self._summaries.Summary(value=values))
            self._writer.flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with storage_errors(self._folder, doing="write TensorBoard events"):
                self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._events.Event(wall_time=time.time(), **fields))
