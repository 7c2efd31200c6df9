"""`fp4rl train` on the packaged mixture, experts replayed: on one device and with its experts over two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import CACHE

ROOT = Path(__file__).parents[2]
MESHES = {"one": (1, []), "experts": (4, ["--set", "mesh.data=2", "--set", "mesh.expert=2"])}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, list[dict]]:
    """The metrics of two steps of configs/ci/moe.toml, each run in a process with its own devices."""
    folder, found = tmp_path_factory.mktemp("mixture"), {}
    for name, (devices, mesh) in MESHES.items():
        words = ["train", "--config", "configs/ci/moe.toml", *mesh]
        words += ["--set", f"run.root={folder}", "--set", f"run.name={name}", "--set", "eval.problems=2"]
        flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
        done = subprocess.run(
            [sys.executable, "-m", "fp4rl_jax", *words],
            env={**os.environ, **CACHE, "XLA_FLAGS": flags},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        found[name] = [json.loads(line) for line in lines]
    return found


@pytest.mark.parametrize("name", MESHES)
def test_replay_reaches_the_trainer_and_nothing_is_dropped(steps, name):
    for step in steps[name]:
        assert step["guidance_bytes_per_token"] == 2 * 2  # layers and active experts
        assert step["moe/dropped_share"] == 0.0
        assert step["moe/load_max"] >= 1.0
        assert step["moe/changed_share"] == 0.0 and step["mismatch_kl"] < 1e-9  # both sides are W4A4


def test_experts_over_two_devices_begin_as_on_one(steps):
    """The first step: same tokens, rewards and loads; the gradient's norm up to the order of its sums."""
    one, many = (steps[name][0] for name in MESHES)
    for key in ("reward_mean", "sampled_tokens", "moe/load_max", "moe/load_entropy", "moe/idle_share"):
        assert one[key] == pytest.approx(many[key], rel=1e-6), key
    assert one["grad_norm"] == pytest.approx(many["grad_norm"], rel=1e-3)
