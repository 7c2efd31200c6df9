"""Runs of two processes on simulated devices: the same run, an end when one is lost, and a restart."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp4rl_jax.parallel import HEARTBEAT_SECONDS, ProcessError, Processes, start
from fp4rl_jax.runs import catalogue, exit_codes
from fp4rl_jax.runs.files import read_lines

ROOT = Path(__file__).parents[2]
#: Sums over rows whose order follows the devices; everything else of a first step is equal bit for bit.
ORDERED = {"grad_norm"}


def words(folder: Path, *more: str) -> list[str]:
    settings = (
        f"run.root={folder}", "run.tensorboard=off", "run.progress=lines", "run.resume=auto",
        "run.checkpoint_every=1", "ops.order=fixed", "trainer.dtype=float32", "rollout.dtype=float32",
        "loop.steps=2", *more,
    )  # fmt: skip
    return ["--config", str(ROOT / "configs/ci/grpo.toml"), *(w for s in settings for w in ("--set", s))]


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", **more,
    }  # fmt: skip


def spawn(command: list[str], log: Path, **more: str) -> subprocess.Popen:
    with log.open("w") as out:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(**more), stdout=out, stderr=subprocess.STDOUT
        )


def local(folder: Path, *more: str) -> subprocess.Popen:
    """Two processes of one run, through the script that people use."""
    script = ["bash", str(ROOT / "launch/local.sh"), "2", "cpu", "120", *words(folder, *more)]
    return spawn(script, folder / "log", **{"XLA_FLAGS": ""})


def pair(folder: Path, *more: str) -> list[subprocess.Popen]:
    """Two processes without anybody who watches them."""
    address = f"localhost:{free_port()}"
    flags = ["--coordinator", address, "--num_processes", "2", "--join_seconds", "120"]
    command = [sys.executable, "-m", "fp4rl_jax", "train", *words(folder, *more), *flags]
    return [spawn([*command, "--process_id", str(i)], folder / f"log{i}") for i in (0, 1)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def metrics(folder: Path) -> list[dict]:
    return [catalogue.without_clock(line) for line in read_lines(folder / "ci-grpo" / "metrics.jsonl")]


def wait_for_step(folder: Path, processes: list[subprocess.Popen], count: int = 1) -> None:
    lines = folder / "ci-grpo" / "metrics.jsonl"
    end = time.monotonic() + 900
    while not lines.exists() or lines.read_text().count("\n") < count:
        assert all(process.poll() is None for process in processes), folder
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """An uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("two")
    code = local(folder, "mesh.fsdp=2").wait(timeout=1200)
    assert code == exit_codes.OK, (folder / "log").read_text()[-4000:]
    return folder


@pytest.mark.slow
def test_batch_keys_and_advantages_do_not_depend_on_processes_or_devices(two, tmp_path):
    """The first step of one process with one device, and of two with one each, are equal to the last bit."""
    command = [sys.executable, "-m", "fp4rl_jax", "train", *words(tmp_path)]
    assert spawn(command, tmp_path / "log").wait(timeout=1200) == exit_codes.OK
    one, several = metrics(tmp_path), metrics(two)
    assert [line["step"] for line in several] == [0, 1]
    assert {k for k in one[0] if one[0][k] != several[0].get(k)} <= ORDERED
    assert one[0].keys() == several[0].keys()
    texts = [read_lines(folder / "ci-grpo" / "transcripts.jsonl") for folder in (tmp_path, two)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_run_and_a_restart_goes_on(two, tmp_path):
    processes = pair(tmp_path, "mesh.fsdp=2", "loop.steps=1000")
    wait_for_step(tmp_path, processes)
    processes[1].kill()
    began = time.monotonic()
    code = processes[0].wait(timeout=HEARTBEAT_SECONDS + 30)
    assert time.monotonic() - began < HEARTBEAT_SECONDS + 10
    assert code not in (0, exit_codes.SAVED_PLEASE_RESTART)
    said = (tmp_path / "log0").read_text()
    assert "process 0 of 2" in said and re.search("Gloo|heartbeat|another task died", said), said[-2000:]
    steps = len(metrics(tmp_path)) + 1
    assert local(tmp_path, "mesh.fsdp=2", f"loop.steps={steps}").wait(timeout=1200) == exit_codes.OK
    assert [line["step"] for line in metrics(tmp_path)] == list(range(steps))
    assert metrics(tmp_path)[:2] == metrics(two)[: min(2, steps)]


@pytest.mark.slow
def test_the_launcher_names_the_process_that_failed(tmp_path):
    (tmp_path / "ci-grpo").mkdir()
    (tmp_path / "ci-grpo" / "config.json").write_text("not json")
    (tmp_path / "ci-grpo" / "evals.jsonl").write_text("{}\n")
    process = local(tmp_path, "mesh.fsdp=2")
    assert process.wait(timeout=300) not in (0, 75)
    said = (tmp_path / "log").read_text()
    assert re.search(r"launch/local.sh: process 0 of 2 ended with code \d+", said), said
    assert "fp4rl train: process 0 of 2: " in said


@pytest.mark.slow
def test_sigterm_is_agreed_on_saved_and_resumed(two, tmp_path):
    process = local(tmp_path, "mesh.fsdp=2", "loop.steps=1000")
    wait_for_step(tmp_path, [process])
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == exit_codes.SAVED_PLEASE_RESTART, (tmp_path / "log").read_text()
    steps = len(metrics(tmp_path)) + 1
    assert local(tmp_path, "mesh.fsdp=2", f"loop.steps={steps}").wait(timeout=1200) == exit_codes.OK
    assert metrics(tmp_path)[:2] == metrics(two)[: min(2, steps)]


def test_a_wrong_coordinator_is_told_with_rank_address_and_reason():
    address = f"localhost:{free_port()}"
    began = time.monotonic()
    with pytest.raises(ProcessError) as caught:
        start(Processes(coordinator=address, count=2, index=1, join_seconds=1))
    assert time.monotonic() - began < 5
    said = str(caught.value)
    assert f"process 1 of 2: no coordinator answers at {address} within 1 s: " in said
    assert "refused" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"index": 2}, r"process 2 of 2: expected 0\.\.1"),
        ({"coordinator": "somewhere"}, "coordinator 'somewhere': expected HOST:PORT"),
        ({"join_seconds": 0}, "join_seconds = 0: expected at least 1"),
    ],
)
def test_processes_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Processes(**{"coordinator": "localhost:1", "count": 2, "index": 0, **given})
