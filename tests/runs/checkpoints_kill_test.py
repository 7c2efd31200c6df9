"""SIGKILL at random instants, and at every kind of file operation, of a save: something sound is left."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from fp4rl_jax.runs import Checkpointer

SCRIPT = Path(__file__).parent / "_victim.py"


def load_victim():
    spec = importlib.util.spec_from_file_location("runs_victim", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


victim = load_victim()


class Server:
    """Starts victims and says how they ended."""

    def __init__(self):
        root = str(Path(__file__).parents[2])
        env = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def start(self, **request) -> int:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._number()

    def status(self) -> int:
        return self._number()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.process.communicate()


def assert_sound(root: Path, steps: tuple[int, ...]):
    """Restores, compares every bit with the state of that step, and saves once more."""
    checkpointer = Checkpointer(root)
    restored = checkpointer.restore(victim.state_of(1))
    assert restored.step in steps and restored.host == {"position": restored.step}
    for got, expected in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(victim.state_of(restored.step)), strict=True
    ):
        if jax.dtypes.issubdtype(got.dtype, jax.dtypes.prng_key):
            got, expected = jax.random.key_data(got), jax.random.key_data(expected)
        assert got.dtype == expected.dtype
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    return restored


def kill_at_random_instants(server: Server, folder: Path, *, instants: int, rng: np.random.Generator) -> int:
    """Kills a saving process `instants` times, each going on from what was left; counts half-written ones."""
    root, acknowledged = folder / "checkpoints", folder / "acknowledged"
    acknowledged.touch()
    half_written = 0
    for _ in range(instants):
        known = len(acknowledged.read_text().split())
        pid = server.start(do="loop", root=str(root), acknowledged=str(acknowledged))
        while len(acknowledged.read_text().split()) <= known:  # past the first save: what follows is uniform
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(pid, signal.SIGKILL)
        assert server.status() == signal.SIGKILL
        last = int(acknowledged.read_text().split()[-1])
        half_written += bool(list(root.glob("*.tmp")))
        restored = assert_sound(root, (last, last + 1))
        if restored.step > last:
            with open(acknowledged, "a") as file:
                file.write(f"{restored.step}\n")
    return half_written


def test_three_random_kills(server, tmp_path, rng):
    kill_at_random_instants(server, tmp_path, instants=3, rng=rng)


@pytest.mark.slow
def test_forty_random_kills(server, tmp_path, rng):
    half_written = kill_at_random_instants(server, tmp_path, instants=40, rng=rng)
    assert half_written >= 10, f"only {half_written} of 40 kills fell into a save"


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory) -> Path:
    """A folder with two sound checkpoints, to copy."""
    root = tmp_path_factory.mktemp("two_saved")
    for step in (1, 2):
        Checkpointer(root).save(step, victim.state_of(step), {"position": step})
    return root


def kill_at_file_operation(server: Server, root: Path, event: int) -> bool:
    """A third checkpoint is killed at its `event`-th operation; False if it got through."""
    server.start(do="event", root=str(root), event=event, step=3)
    status = server.status()
    assert status in (0, signal.SIGKILL)
    restored = assert_sound(root, (2, 3))
    Checkpointer(root).save(4, victim.state_of(4), {"position": 4})
    assert not list(root.glob("*.tmp")) and not list(root.glob("*.gone"))
    assert assert_sound(root, (4,)).passed_over == ()
    return status != 0 and restored.step in (2, 3)


def test_killed_at_the_fifth_file_operation(server, tmp_path, two_saved):
    shutil.copytree(two_saved, tmp_path / "5")
    assert kill_at_file_operation(server, tmp_path / "5", 5)


@pytest.mark.slow
def test_killed_at_every_file_operation(server, tmp_path, two_saved):
    killed = 0
    for event in range(200):
        shutil.copytree(two_saved, tmp_path / str(event))
        if not kill_at_file_operation(server, tmp_path / str(event), event):
            break
        killed += 1
    assert 30 < killed < 200


@pytest.mark.slow
def test_killed_while_replacing_the_only_checkpoint(server, tmp_path):
    """Saving a step again never leaves a moment without a sound checkpoint of it."""
    for event in range(0, 200, 3):
        root = tmp_path / str(event)
        Checkpointer(root).save(3, victim.state_of(3), {"position": 3})
        server.start(do="event", root=str(root), event=event, step=3)
        status = server.status()
        assert_sound(root, (3,))
        if status == 0:
            return
    raise AssertionError("the save has more than 200 file operations")


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_like_an_uninterrupted_one(server, tmp_path, rng):
    ticks = tmp_path / "ticks"
    server.start(do="run", root=str(tmp_path / "whole"), steps=24, ticks=str(tmp_path / "unread"))
    assert server.status() == 0
    for kills in range(40):  # noqa: B007 (read below)
        ticks.write_text("")
        pid = server.start(do="run", root=str(tmp_path / "cut"), steps=24, ticks=str(ticks))
        enough = int(rng.integers(1, 24))
        while len(ticks.read_text()) < enough and alive(pid):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        with contextlib.suppress(ProcessLookupError):  # it may have come to its end
            os.kill(pid, signal.SIGKILL)
        if server.status() == 0:
            break
    for name in ("metrics.jsonl", "transcripts.jsonl", "evals.jsonl"):
        assert (tmp_path / "cut/a" / name).read_bytes() == (tmp_path / "whole/a" / name).read_bytes()
    template = {"total": np.zeros(4096, np.float32)}
    cut, whole = (
        Checkpointer(tmp_path / name / "a/checkpoints").restore(template) for name in ("cut", "whole")
    )
    assert cut.step == whole.step == 24
    assert cut.state["total"].tobytes() == whole.state["total"].tobytes()
    assert 1 <= kills < 39


def alive(pid: int) -> bool:
    """Whether a victim still runs; its server reaps it as soon as it ends."""
    return Path(f"/proc/{pid}").exists()
