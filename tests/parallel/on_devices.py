"""Runs a script of this folder on simulated devices, in a process of its own, and reads what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import CACHE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def found_by(script: str, case: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """`FOLDER/found.json` after `script case folder`; its warnings are errors.

    One thread a device: the devices of one process share its threads, and collectives that run side by side
    may otherwise each wait for a thread that another one holds.
    """
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / script), case, str(folder)],
        env={**os.environ, **CACHE, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())
