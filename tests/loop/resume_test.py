"""A run that was interrupted and resumed is the run that was not: metrics and parameters, bit for bit."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fp4rl_jax.cli.train import train
from fp4rl_jax.config import load
from fp4rl_jax.runs import catalogue, exit_codes
from fp4rl_jax.runs.files import read_lines
from tests.processes import CACHE, start_child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 4


def words(folder: Path, *more: str) -> list[str]:
    return [
        f"run.root={folder}", "run.tensorboard=off", "run.progress=off", "run.resume=auto",
        "run.checkpoint_every=1", f"loop.steps={STEPS}", *more,
    ]  # fmt: skip


def config(folder: Path, *more: str):
    return load([str(ROOT / "configs/ci/grpo.toml")], words(folder, *more))


def metrics(folder: Path) -> list[dict]:
    return [catalogue.without_clock(line) for line in read_lines(folder / "ci-grpo" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(config(folder)) == exit_codes.OK
    return folder


def test_every_metric_is_documented_and_every_step_is_there(whole):
    lines = read_lines(whole / "ci-grpo" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert catalogue.undocumented(lines[0]) == []
    counted = [
        f"quant/{what}/{site}/{name}"
        for what in ("rollout", "trainer", "weights")
        for site in ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/down")
        for name in ("underflow", "saturation", "zero_scale", "error")
    ]
    assert sorted(key for key in lines[0] if key.startswith("quant/")) == sorted(counted)
    assert all(0 < line["quant/trainer/mlp/down/underflow"] < 1 for line in lines)
    assert all(0 < line["quant/rollout/mlp/down/underflow"] < 1 for line in lines)
    for key in ("reward_mean", "mismatch_kl", "logprob_gap_max", "tokens_per_second", "entropy", "grad_norm"):
        assert all(np.isfinite(line[key]) for line in lines), key


def test_the_sides_agree_and_the_ratio_is_one(whole):
    for line in metrics(whole):
        assert line["policy_ratio"] == 1.0
        assert line["updates_skipped"] == 0.0


@pytest.mark.parametrize("first", [1, 2, 3])
def test_resuming_after_any_step_changes_nothing(whole, tmp_path, first):
    assert train(config(tmp_path, f"loop.steps={first}")) == exit_codes.OK
    assert train(config(tmp_path)) == exit_codes.OK
    assert metrics(tmp_path) == metrics(whole)
    assert restored(tmp_path).keys() == restored(whole).keys()
    for path, leaf in restored(whole).items():
        np.testing.assert_array_equal(restored(tmp_path)[path], leaf, err_msg=path)


def test_guidance_in_host_memory_changes_no_metric_of_a_resumed_run(tmp_path):
    """1 + 1 steps with records in host memory are 2 with them on the device, but for the bytes there."""
    chosen = ("recipe.name=trace", "eval.problems=0", "trainer.microbatch_rows=2")
    folders = [tmp_path / name for name in ("device", "host")]
    assert train(config(folders[0], *chosen, "loop.steps=2")) == exit_codes.OK
    for steps in (1, 2):
        more = ("trainer.guidance_memory=host", f"loop.steps={steps}")
        assert train(config(folders[1], *chosen, *more)) == exit_codes.OK
    lines = [metrics(folder) for folder in folders]
    held = [[line.pop("guidance_device_bytes") for line in run] for run in lines]
    assert [0.5 * size for size in held[0]] == held[1]  # two of four microbatches
    assert lines[0] == lines[1]
    other = restored(folders[1], "recipe.name=trace")
    for path, leaf in restored(folders[0], "recipe.name=trace").items():
        np.testing.assert_array_equal(other[path], leaf, err_msg=path)


@pytest.mark.parametrize("recipe", ["quads", "trace"])
def test_running_statistics_are_part_of_what_is_resumed(tmp_path, recipe):
    """A recipe whose rollout calibrates: 1 + 1 steps are 2 steps in metrics, columns and KV scales."""
    chosen = (f"recipe.name={recipe}", "eval.problems=0")
    folders = [tmp_path / name for name in ("whole", "parts")]
    assert train(config(folders[0], *chosen, "loop.steps=2")) == exit_codes.OK
    for steps in (1, 2):
        assert train(config(folders[1], *chosen, f"loop.steps={steps}")) == exit_codes.OK
    assert metrics(folders[0]) == metrics(folders[1])
    last = metrics(folders[0])[1]
    assert catalogue.undocumented(last) == []
    if recipe == "quads":
        assert last["residual/mlp/down/energy_after"] > 0
    else:  # recorded under the version that is trained
        assert last["guidance_age"] == 0.0 and last["guidance_bytes_per_token"] == recorded_bytes(folders[0])
        assert 0 <= last["quant/trainer/kv/guided"] <= 1


def recorded_bytes(folder: Path) -> int:
    """What a token's record takes by the formula."""
    from fp4rl_jax.cli import _job
    from fp4rl_jax.models import guidance

    made = _job.builder(config(folder, "recipe.name=trace"))
    return guidance.record_bytes(made.model, made.sides.rollout.specs, made.sides.rollout.kv)


def restored(folder: Path, *more: str) -> dict[str, np.ndarray]:
    """Trained and frozen parameters and moments of the last checkpoint, by path."""
    import jax

    from fp4rl_jax.cli import _job
    from fp4rl_jax.runs import Checkpointer

    made = _job.builder(config(folder, *more))
    template = made.template()
    state = Checkpointer(folder / "ci-grpo" / "checkpoints").restore(template).state
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def spawn(folder: Path, cache: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "fp4rl_jax", "train", "--config", str(ROOT / "configs/ci/grpo.toml")]
    for word in words(folder):
        command += ["--set", word]
    return start_child(
        command, cwd=ROOT, env={**os.environ, **CACHE, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    )


def files(folder: Path) -> set[tuple[str, int, int]]:
    """Path, bytes and time of change of every file and folder below `folder`."""
    found = set()
    for entry in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a save renames and removes
            status = entry.stat()
            found.add((str(entry), status.st_size, status.st_mtime_ns))
    return found


def has_ended_after(process: subprocess.Popen, folder: Path, changes: int) -> bool:
    """Waits until the process has changed `folder` so often as could be seen, or has ended."""
    before = files(folder)
    while changes and process.poll() is None:
        time.sleep(0.002)
        after = files(folder)
        changes -= after != before
        before = after
    return process.poll() is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """An uninterrupted run in processes like the interrupted ones.

    Attributes:
        folder: of the run.
        cache: of the compiled programs.
        quiet: seconds from its start to its first change of the folder.
        changes: of the folder that could be seen.
    """

    folder: Path
    cache: Path
    quiet: float
    changes: int


@pytest.fixture(scope="module")
def spawned(tmp_path_factory) -> Whole:
    folder = tmp_path_factory.mktemp("spawned")
    cache, warm = folder / "cache", folder / "warm"
    assert spawn(folder / "cold", cache).wait(timeout=900) == exit_codes.OK
    began = time.monotonic()
    process = spawn(warm, cache)
    assert not has_ended_after(process, warm, 1)
    quiet, changes = time.monotonic() - began, 1
    while not has_ended_after(process, warm, 1):
        changes += 1
    assert process.wait() == exit_codes.OK
    return Whole(folder=warm, cache=cache, quiet=quiet, changes=changes)


def test_sigterm_saves_and_asks_for_a_restart(spawned, tmp_path):
    process = spawn(tmp_path, spawned.cache)
    lines = tmp_path / "ci-grpo" / "metrics.jsonl"
    while process.poll() is None and not (lines.exists() and lines.read_text().count("\n") >= 1):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) in (exit_codes.SAVED_PLEASE_RESTART, exit_codes.OK)
    assert spawn(tmp_path, spawned.cache).wait(timeout=300) == exit_codes.OK
    assert metrics(tmp_path) == metrics(spawned.folder)


def test_a_run_killed_at_random_instants_ends_as_the_whole_one(spawned, tmp_path):
    """20 SIGKILLs at random instants of starting, stepping and saving; every finished run is the same run.

    The instant follows the run's own writing, since how fast a process is changes with what else runs: a
    fifth of the kills while it starts, the others a moment after a random one of its changes to the folder,
    of which half as many as a whole run makes, so that a run takes several starts to its end.
    """
    chance = random.Random(0)
    kills, folder, starts = 0, tmp_path / "run0", 0
    while kills < 20:
        process = spawn(folder, spawned.cache)
        starts += 1
        assert starts < 80, f"only {kills} of {starts} starts were killed in time"
        changes = chance.choice([0, 1, 1, 1, 1]) * chance.randint(1, spawned.changes // 2)
        ended = has_ended_after(process, folder, changes)
        time.sleep(chance.uniform(0, 0.1 if changes else spawned.quiet))
        if not ended and process.poll() is None:
            process.kill()
            process.wait()
            kills += 1
            continue
        assert process.wait() == exit_codes.OK
        assert metrics(folder) == metrics(spawned.folder)
        folder = tmp_path / f"run{starts}"
    assert spawn(folder, spawned.cache).wait(timeout=900) == exit_codes.OK
    assert metrics(folder) == metrics(spawned.folder)
    print(f"{starts} starts, {kills} killed; a whole run changes its folder {spawned.changes} times")
