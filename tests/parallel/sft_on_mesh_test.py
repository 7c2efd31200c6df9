"""`fp4rl sft` on two simulated devices gives the losses of one within the bound of two orders of its sums."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "_sft_on_mesh.py"
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
LR = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_losses_and_models_are_those_of_one_device_and_a_run_resumes_bit_for_bit(kind, tmp_path):
    """A step of Adam moves a weight by at most its rate, so after one the masters lie at most two rates apart
    and the loss moves by at most that times the gradient's 1-norm, besides its sums' own bound."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), kind, str(tmp_path)],
        env={**os.environ, **cache, "XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    print(found)
    own = found["logprob_bound"]
    moved = 2 * LR * found["grad_norm"] * math.sqrt(found["parameters"])
    for step, (one, mesh) in enumerate(zip(*found["losses"], strict=True)):
        assert one > 1 and abs(one - mesh) <= own + step * moved < 0.1 * one
    assert found["examples"][0] == found["examples"][1]
    assert found["models"] <= 2 * 2 * LR * (1 + 1e-3)
    assert found["resumed"]
