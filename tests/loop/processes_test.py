"""Runs of two processes on simulated devices: the same run, an end when one is lost, and a restart."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fp4rl_jax import interchange
from fp4rl_jax.parallel import HEARTBEAT_SECONDS, ProcessError, Processes, start
from fp4rl_jax.runs import Checkpointer, catalogue, exit_codes
from fp4rl_jax.runs.files import read_lines
from tests.processes import CACHE, start_child

ROOT = Path(__file__).parents[2]
#: Sums over rows whose order follows the devices; everything else of a first step is equal bit for bit.
ORDERED = {"grad_norm", "entropy"}


def words(folder: Path, *more: str) -> list[str]:
    settings = (
        f"run.root={folder}", "run.tensorboard=off", "run.progress=lines", "run.resume=auto",
        "run.checkpoint_every=1", "ops.order=fixed", "trainer.dtype=float32", "rollout.dtype=float32",
        *more,
    )  # fmt: skip
    return ["--config", str(ROOT / "configs/ci/grpo.toml"), *(w for s in settings for w in ("--set", s))]


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
        **CACHE,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", **more,
    }  # fmt: skip


def spawn(command: list[str], log: Path, **more: str) -> subprocess.Popen:
    return start_child(command, cwd=ROOT, env=environment(**more), log=log)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """What was seen of a run of two processes: one killed, the run restarted, then asked to stop.

    Attributes:
        one: first step of a run of one process, metrics and transcripts; several: of the run of two.
        code, said, seconds: of process 0 after process 1 was killed.
        stopped: exit code of the restarted run after SIGTERM.
        steps: of all lines of metrics at the end; saved: the last checkpoint's.
        seen: lines of metrics before the restart.
    """

    one: tuple[dict, list]
    several: tuple[dict, list]
    code: int
    said: str
    seconds: float
    stopped: int
    steps: list[int]
    saved: int
    seen: int


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    alone, folder = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "fp4rl_jax", "train", *words(alone, "loop.steps=1")]
    assert spawn(command, alone / "log").wait(timeout=1200) == exit_codes.OK, (alone / "log").read_text()

    settings = ("mesh.fsdp=2", "loop.steps=100000")
    processes = pair(folder, *settings)
    wait_for_step(folder, processes, count=2)
    several = first_step(folder)
    processes[1].kill()
    began = time.monotonic()
    code = processes[0].wait(timeout=HEARTBEAT_SECONDS + 60)
    seconds = time.monotonic() - began
    processes[1].wait()
    seen = len(metrics(folder))

    again = local(folder, *settings)
    wait_for_step(folder, [again], count=seen + 2)
    again.send_signal(signal.SIGTERM)
    stopped = again.wait(timeout=300)
    return Story(
        one=first_step(alone), several=several, code=code, said=(folder / "log0").read_text(),
        seconds=seconds, stopped=stopped, steps=[line["step"] for line in metrics(folder)],
        saved=Checkpointer(folder / "ci-grpo" / "checkpoints").steps()[-1], seen=seen,
    )  # fmt: skip


def first_step(folder: Path) -> tuple[dict, list]:
    texts = read_lines(folder / "ci-grpo" / "transcripts.jsonl")
    return metrics(folder)[0], [line for line in texts if line["step"] == 0]


@pytest.mark.slow
def test_batch_keys_and_advantages_do_not_depend_on_processes_or_devices(story):
    """The first step of one process with one device and of two with one each are equal to the last bit."""
    (one, texts), (several, same_texts) = story.one, story.several
    assert one.keys() == several.keys() and texts == same_texts and texts
    ordered = ORDERED | {key for key in one if re.fullmatch("quant/.*/error", key)}
    assert {key for key in one if one[key] != several[key]} <= ordered
    for key in ordered:
        assert several[key] == pytest.approx(one[key], rel=1e-4), key


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others_with_rank_and_reason(story):
    assert story.code not in (exit_codes.OK, exit_codes.SAVED_PLEASE_RESTART)
    assert story.seconds < HEARTBEAT_SECONDS + 10
    assert re.search("Gloo|heartbeat|another task died", story.said), story.said[-2000:]
    print(f"process 0 ended {story.seconds:.1f} s after process 1 was killed, code {story.code}")


@pytest.mark.slow
def test_a_restart_goes_on_and_sigterm_is_agreed_on_and_saved(story):
    assert story.stopped == exit_codes.SAVED_PLEASE_RESTART
    assert story.steps == list(range(len(story.steps))) and len(story.steps) > story.seen
    assert story.saved == len(story.steps)


@pytest.mark.slow
def test_the_launcher_names_the_process_that_failed(tmp_path):
    (tmp_path / "ci-grpo").mkdir()
    (tmp_path / "ci-grpo" / "config.json").write_text("not json")
    (tmp_path / "ci-grpo" / "evals.jsonl").write_text("{}\n")
    process = local(tmp_path, "mesh.fsdp=2", "loop.steps=2")
    assert process.wait(timeout=300) not in (exit_codes.OK, exit_codes.SAVED_PLEASE_RESTART)
    said = (tmp_path / "log").read_text()
    assert re.search(r"launch/local.sh: process 0 of 2 ended with code \d+", said), said
    assert "fp4rl train: process 0 of 2: " in said


STUB = """#!/usr/bin/env bash
# In place of Python: `-c` makes a port, `-m fp4rl_jax train ...` is a process that runs until SIGTERM.
if [ "$1" = -c ]; then echo 12345; exit; fi
while [ "$1" != --process_id ]; do shift; done
trap 'sleep 0.2; exit 75' TERM
echo "started $2"
if [ "$2" = 1 ] && [ -n "$FAILS" ]; then exit "$FAILS"; fi
while true; do sleep 0.05; done
"""


def launch(folder: Path, fails: str) -> subprocess.Popen:
    stub = folder / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    script = ["bash", str(ROOT / "launch/local.sh"), "3", "cpu", "5", "--config", "any.toml"]
    return subprocess.Popen(
        script, env={**os.environ, "PYTHON": str(stub), "FAILS": fails}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_the_launcher_ends_all_where_one_fails_and_names_it(tmp_path):
    with launch(tmp_path, fails="7") as process:
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "launch/local.sh: process 1 of 3 ended with code 7" in said


def test_the_launcher_hands_sigterm_on_and_waits_for_all(tmp_path):
    with launch(tmp_path, fails="") as process:
        assert process.stdout is not None
        started = {process.stdout.readline() for _ in range(3)}
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert started == {f"started {rank}\n" for rank in range(3)}
    assert process.returncode == exit_codes.SAVED_PLEASE_RESTART
    assert "ended with code" not in said


def test_a_wrong_coordinator_is_told_with_rank_address_and_reason():
    address = f"localhost:{free_port()}"
    began = time.monotonic()
    with pytest.raises(ProcessError) as caught:
        start(Processes(coordinator=address, count=2, index=1, join_seconds=1))
    assert time.monotonic() - began < 5
    said = str(caught.value)
    assert f"process 1 of 2: no coordinator answers at {address} within 1 s: " in said
    assert "refused" in said


@pytest.mark.slow
def test_a_process_0_that_waits_in_vain_has_said_for_whom(tmp_path):
    flags = ["--coordinator", f"localhost:{free_port()}", "--num_processes", "2", "--process_id", "0"]
    command = [sys.executable, "-m", "fp4rl_jax", "train", *words(tmp_path), *flags, "--join_seconds", "2"]
    began = time.monotonic()
    process = spawn(command, tmp_path / "log")
    assert process.wait(timeout=60) == -signal.SIGABRT and time.monotonic() - began < 40
    said = (tmp_path / "log").read_text()
    assert "process 0 of 2: waiting for the others at localhost:" in said
    assert "DEADLINE_EXCEEDED" in said


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


@pytest.mark.slow
def test_supervised_training_in_two_processes_writes_one_model_with_the_losses_of_one(tmp_path):
    """Two steps: the first loss to the last bit, weights at most two rates a step apart (each moves one)."""
    rate = 1e-4  # configs/ci/grpo.toml
    chosen = ("recipe.name=bf16", "eval.problems=0", "loop.steps=2", "trainer.frozen_dtype=float32")
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    outputs = [["--output", str(folder / "model")] for folder in folders]
    sft = [sys.executable, "-m", "fp4rl_jax", "sft"]
    alone = spawn([*sft, *words(folders[0], *chosen), *outputs[0]], folders[0] / "log")
    assert alone.wait(timeout=1200) == exit_codes.OK, (folders[0] / "log").read_text()
    joined = ["--coordinator", f"localhost:{free_port()}", "--num_processes", "2", "--join_seconds", "120"]
    command = [*sft, *words(folders[1], "mesh.data=2", *chosen), *outputs[1], *joined]
    both = [spawn([*command, "--process_id", str(i)], folders[1] / f"log{i}") for i in (0, 1)]
    for i, process in enumerate(both):
        assert process.wait(timeout=1200) == exit_codes.OK, (folders[1] / f"log{i}").read_text()
    one, two = (metrics(folder) for folder in folders)
    assert one[0]["loss"] == two[0]["loss"] and one[0]["trained_tokens"] == two[0]["trained_tokens"]
    first, second = (interchange.load(str(folder / "model"), dtype="float32") for folder in folders)
    apart = [
        np.abs(np.asarray(a) - np.asarray(b)).max()
        for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True)
    ]
    assert max(apart) <= 2 * 2 * rate * (1 + 1e-3)
    said = [(folders[1] / f"log{i}").read_text().count("model: ") for i in (0, 1)]
    assert said == [1, 0]
