"""What every record of a benchmark says of its run: when, which commit, on what, with which jax."""

import datetime
import shutil
import subprocess
from typing import Any

import jax


def commit() -> str | None:
    """The hash of HEAD, or None outside a repository and without git."""
    if shutil.which("git") is None:
        return None
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def facts() -> dict[str, Any]:
    """date, commit, device, jax; the device is initialised."""
    return {
        "date": now(),
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
