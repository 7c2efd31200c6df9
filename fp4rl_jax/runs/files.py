"""Durable files: whole-file writes that are all or nothing, and append-only JSON lines."""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fp4rl_jax.runs.errors import RecordError, storage_errors


def fsync_directory(path: Path) -> None:
    """Makes the entries of a folder (creations, renames) durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`: a reader, or a crash, sees the old bytes or the new, never a mix.

    Raises:
        StorageError: the disk refused; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with storage_errors(path, doing="write a file"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def dump_json(value: Any) -> bytes:
    """Canonical, readable JSON: sorted keys, two-space indent, strict (no NaN literals)."""
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def dump_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """One line of strict JSON a record, keys in their own order."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        RecordError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecordError(f"{path} does not exist") from None
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None


def plain_value(value: Any) -> Any:
    """A JSON value of `value`: 0-d arrays become Python numbers, tuples lists, exactly.

    Raises:
        RecordError: the value has no JSON form (an array of rank 1 or more, an object).
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    shape = getattr(value, "shape", None)
    if shape == () and hasattr(value, "item"):
        return plain_value(value.item())
    raise RecordError(
        f"a record holds plain numbers and strings, got {type(value).__name__} of shape {shape}"
    )


def strict_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values with every non-finite number as null, its key listed under `nonfinite`."""
    plain = {key: plain_value(value) for key, value in record.items()}
    bad = sorted(k for k, v in plain.items() if isinstance(v, float) and not math.isfinite(v))
    if bad:
        plain = {key: None if key in bad else value for key, value in plain.items()} | {"nonfinite": bad}
    return plain


class JsonLines:
    """An append-only file of one JSON object a line; each line is on the disk when `append` returns."""

    def __init__(self, path: Path):
        self.path = path
        with storage_errors(path, doing="open a file for appending"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends one object.

        Raises:
            StorageError: the disk refused; the lines before are kept and a part line is cut off.
            RecordError: a value has no JSON form; nothing was written.
        """
        line = dump_lines([strict_record(record)])
        start = os.fstat(self._descriptor).st_size
        with storage_errors(self.path, doing="append a line"):
            try:
                _write_all(self._descriptor, line)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, start)
                raise

    def close(self) -> None:
        """Closes the file; later appends fail. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write_all(descriptor: int, data: bytes) -> None:
    """Writes every byte; a nearly full disk takes a part first and refuses the rest."""
    while data:
        data = data[os.write(descriptor, data) :]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; a missing file is an empty list.

    A last line without its newline is what a crash leaves behind and is skipped.

    Raises:
        RecordError: a line before the last is not a JSON object; the message has its number.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RecordError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise RecordError(f"{path}, line {number} is not an object: {line[:80]!r}")
        records.append(record)
    return records


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Rewrites a file of JSON lines with only the records that `keep` accepts, atomically.

    Kept lines keep their bytes. A crash leaves the old file or the new one.

    Returns:
        How many lines were dropped, a half-written last one included.
    """
    if not path.exists():
        return 0
    data = path.read_bytes()
    records = read_lines(path)
    lines = data.split(b"\n")
    kept = [line for line, record in zip(lines, records, strict=False) if keep(record)]
    dropped = len(records) - len(kept) + (1 if lines[-1] else 0)
    if dropped:
        write_atomically(path, b"".join(line + b"\n" for line in kept))
    return dropped
