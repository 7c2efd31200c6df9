"""Runs that are finished and have given up their checkpoints: a file in the folder says how far they came."""

import shutil
from pathlib import Path

from fp4rl_jax.runs.directory import CHECKPOINTS
from fp4rl_jax.runs.errors import storage_errors
from fp4rl_jax.runs.files import dump_json, read_json, write_atomically

FINISHED = "finished.json"


def steps(path: Path) -> int:
    """The steps that the finished run of this folder has, 0 without such a file."""
    file = path / FINISHED
    return read_json(file)["steps"] if file.exists() else 0


def give_up_checkpoints(path: Path, *, steps: int) -> None:
    """Notes the steps of a finished run, then removes its checkpoints; nothing where there are none.

    Stopped between the two, the next call does the rest.

    Raises:
        StorageError: the disk refused.
    """
    if not (path / CHECKPOINTS).is_dir():
        return
    write_atomically(path / FINISHED, dump_json({"steps": steps}))
    with storage_errors(path / CHECKPOINTS, doing="remove the checkpoints of a finished run"):
        shutil.rmtree(path / CHECKPOINTS)


def begin_anew(path: Path) -> None:
    """Forgets that the run was finished: it is to have more steps, and starts from its first.

    Raises:
        StorageError: the disk refused.
    """
    with storage_errors(path / FINISHED, doing="begin a finished run anew"):
        (path / FINISHED).unlink(missing_ok=True)
