"""`fp4rl bench kernels` says what runs."""

import pytest

from fp4rl_jax.cli import main
from fp4rl_jax.cli.bench import chosen
from fp4rl_jax.ops.machine import Machine


def test_a_cpu_says_what_it_runs_and_times_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--case=sq8k", "--rows=8"]) == 0
    out = capsys.readouterr().out
    assert "m=8     xla        sm90: needs a GPU of compute capability 9.0, got cpu None" in out
    assert "Nothing is timed: this is a cpu" in out


def test_a_hopper_gpu_takes_the_kernel() -> None:
    lines = chosen(Machine(platform="gpu", capability=(9, 0)), ["sq4k"], [8, 1024], "hif4")
    assert [line.split()[5] for line in lines[2:]] == ["sm90", "sm90"]


def test_another_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernel"]) == 2
    assert "'kernel'" in capsys.readouterr().err
