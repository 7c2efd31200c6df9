"""What can go wrong with a run folder, as types: each message is one line with the path in it.

The command line prints `str(error)` and exits with `error.exit_code`; no traceback is needed to
act on any of these.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp4rl_jax.runs import exit_codes


class RunError(Exception):
    """A run folder cannot be used as asked; the base of everything in this file."""

    exit_code = exit_codes.RUN


class RunExistsError(RunError):
    """A new run was asked for in a folder that already holds one."""


class RunNotFoundError(RunError):
    """The folder holds no run."""


class RunBusyError(RunError):
    """Another live process holds the run folder."""


class ConfigMismatchError(RunError):
    """A resumed run's configuration differs from the saved one in fields that may not change."""


class RecordError(RunError):
    """A line of metrics, evaluations or transcripts cannot be written or read back."""


class MissingExtraError(RunError):
    """An optional package is not installed; the message names the extra that brings it."""


class CheckpointError(RunError):
    """No checkpoint can be saved or restored as asked."""

    exit_code = exit_codes.CHECKPOINT


class NoCheckpointError(CheckpointError):
    """The folder has no checkpoint that passes its digests."""


class WrongCheckpointError(CheckpointError):
    """The checkpoint is sound and belongs to other parameters: leaves, shapes or dtypes differ."""


class StorageError(RunError):
    """The disk refused: full, over quota, read-only or failing. What was there before is kept."""

    exit_code = exit_codes.STORAGE


def missing_extra(package: str, *, extra: str, purpose: str) -> MissingExtraError:
    """The error for an optional package that is absent."""
    return MissingExtraError(
        f"{purpose} needs {package}: install the extra with pip install 'fp4rl_jax[{extra}]'"
    )


_REASONS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EIO: "the disk reports an input/output error",
    errno.EFBIG: "the file is too large for the file system",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a file of that name is in the way",
    errno.ENOENT: "a folder of the path is missing and cannot be made",
    errno.ENAMETOOLONG: "the name is too long for the file system",
}

# What the array store says, in its own words, when the system call under it was refused.
_STORE_REASONS = {
    "No space left on device": _REASONS[errno.ENOSPC],
    "Disk quota exceeded": _REASONS[errno.EDQUOT],
    "Read-only file system": _REASONS[errno.EROFS],
    "Permission denied": _REASONS[errno.EACCES],
    "Operation not permitted": _REASONS[errno.EPERM],
    "Input/output error": _REASONS[errno.EIO],
    "File too large": _REASONS[errno.EFBIG],
}


def storage_reason(error: BaseException) -> str | None:
    """Why the disk refused, in plain words, or None if `error` is about something else."""
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno, (error.strerror or str(error)).lower())
    text = str(error)
    return next((reason for words, reason in _STORE_REASONS.items() if words in text), None)


@contextmanager
def storage_errors(path: Path, *, doing: str) -> Iterator[None]:
    """Turns a disk's refusal inside the block into a one-line `StorageError`.

    Args:
        path: what was being written; an OSError that names a file of its own wins.
        doing: the verb phrase for the message, e.g. "write the metrics".

    Raises:
        StorageError: the disk refused. Every other error passes through unchanged.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # tensorstore reports a refused write as a ValueError
        reason = storage_reason(error)
        if reason is None:
            raise
        raise StorageError(f"cannot {doing} at {path}: {reason}") from None
