"""A run of two processes: both take part in checkpoints, one writes the records."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fp4rl_jax.runs import files

SCRIPT = Path(__file__).parent / "_two_processes.py"


def run_both(root: Path, resume: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    both = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(index), port, str(root), resume],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(SCRIPT.parents[2]), "PATH": "/usr/bin:/bin"},
        )
        for index in (0, 1)
    ]
    ended = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    return [next(line for line in out.splitlines() if line[0] in "01") for out, _ in ended]


@pytest.mark.slow
def test_two_processes_share_a_run(tmp_path):
    assert run_both(tmp_path, "never") == ["0 0 (1,)", "1 0 (1,)"]
    assert run_both(tmp_path, "must") == ["0 1 (1, 2)", "1 1 (1, 2)"]
    assert [line["step"] for line in files.read_lines(tmp_path / "a/metrics.jsonl")] == [0, 1]
    assert [line["step"] for line in files.read_lines(tmp_path / "a/evals.jsonl")] == [0, 1]
