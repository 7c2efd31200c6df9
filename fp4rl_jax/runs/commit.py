"""The commit marker of a checkpoint: size and SHA-256 of every file, and the marker's own digest."""

import hashlib
import os
from pathlib import Path
from typing import Any

from fp4rl_jax.runs.errors import RecordError
from fp4rl_jax.runs.files import dump_json, fsync_directory, read_json, write_atomically

MARKER = "commit.json"


def write(folder: Path, values: dict[str, Any]) -> None:
    """Syncs every file and folder below `folder` and writes the marker over their digests."""
    files = {}
    for path in _files(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": digest}
    for path in sorted({path.parent for path in _files(folder)}):
        fsync_directory(path)
    body = {**values, "files": files}
    write_atomically(folder / MARKER, dump_json({**body, "digest": _digest(body)}))


def read(folder: Path) -> dict[str, Any]:
    """The marker's values.

    Raises:
        RecordError: there is no marker, or it is not JSON.
    """
    return read_json(folder / MARKER)


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None if every byte is as it was committed."""
    if not (folder / MARKER).is_file():
        return "half-written: no commit marker"
    try:
        marker = read(folder)
        if not isinstance(marker, dict) or "files" not in marker:
            return f"{MARKER} is damaged: it lists no files"
        canonical = dump_json(marker) == (folder / MARKER).read_bytes()
        if marker.pop("digest", None) != _digest(marker) or not canonical:
            return f"{MARKER} is damaged: its own digest differs"
        return _file_problem(folder, marker["files"])
    except RecordError as error:
        return f"{MARKER} is damaged: {error}"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"


def _file_problem(folder: Path, files: dict[str, dict[str, Any]]) -> str | None:
    for name, expected in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes, expected {expected['bytes']}"
    for name, expected in sorted(files.items()):
        with open(folder / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                return f"the content of {name} differs from its SHA-256"
    return None


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MARKER]


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(dump_json(body)).hexdigest()
