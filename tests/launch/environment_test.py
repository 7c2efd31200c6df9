"""launch/*.sh: what a POSIX `sh` that sources them sets (it gives a sourced file no arguments)."""

import os
import subprocess
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
