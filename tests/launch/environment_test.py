"""launch/*.sh: what a POSIX `sh` that sources them sets (it gives a sourced file no arguments)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def variables(files: tuple[str, ...], **given: str) -> dict[str, str]:
    """The environment after sourcing the files in `sh`."""
    line = "; ".join((*(f". launch/{file}" for file in files), "env -0"))
    found = subprocess.run(
        ["sh", "-euc", line],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **given},
        capture_output=True,
        check=True,
    )
    pairs = (entry.partition(b"=") for entry in found.stdout.split(b"\0") if entry)
    return {name.decode(): value.decode() for name, _, value in pairs}


@pytest.mark.parametrize(
    ("files", "given", "flags"),
    [
        (("env.sh",), {}, None),
        (("env.sh", "deterministic.sh"), {}, FLAGS),
        (("env.sh", "deterministic.sh"), {"XLA_FLAGS": "--xla_dump_to=here"}, f"--xla_dump_to=here {FLAGS}"),
    ],
)
def test_the_flags_that_make_a_gpu_repeat_are_set_where_they_are_asked_for(files, given, flags) -> None:
    found = variables(files, **given)
    assert (found["XLA_FLAGS"].strip() if "XLA_FLAGS" in found else None) == flags
    assert ("NCCL_ALGO" in found) == ("deterministic.sh" in files)


def test_what_the_user_set_stays() -> None:
    found = variables(("env.sh",), XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert found["NCCL_NVLS_ENABLE"] == "0" and found["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"


def test_the_multi_process_service_is_started_once_and_its_folder_is_the_clients(tmp_path) -> None:
    """The control is a stand-in that notes its call and makes the socket that the real one makes."""
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        '#!/bin/sh\necho "$@" >> calls\n'
        f"{sys.executable} -c 'import os, socket as s; s.socket(s.AF_UNIX).bind(\"pipe/control\")'\n"
    )
    control.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_MPS_PIPE_DIRECTORY": "pipe"}
    line = f". {ROOT}/launch/mps.sh; . {ROOT}/launch/mps.sh; echo $CUDA_MPS_LOG_DIRECTORY"
    found = subprocess.run(
        ["sh", "-euc", line], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "pipe\n"
    assert (tmp_path / "calls").read_text() == "-d\n"
