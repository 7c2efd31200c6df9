"""Processes that a test starts: what they are given, and that none outlives its file."""

import os
import subprocess
from pathlib import Path

#: Keeps its compiled programs, small ones too, where those of the tests are (`conftest.py`).
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

_started: list[subprocess.Popen] = []


def start_child(
    command: list[str], *, cwd: Path, env: dict[str, str], log: Path | None = None
) -> subprocess.Popen:
    """Starts a process that writes both its outputs into `log`; `end_all` ends it where the test did not."""
    with open(os.devnull if log is None else log, "w") as out:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT)
    _started.append(process)
    return process


def end_all() -> None:
    """Kills and reaps what still runs, as after a failed test, which would disturb those after it."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
        process.wait()
