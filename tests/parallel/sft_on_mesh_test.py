"""`fp4rl sft` on two simulated devices gives the losses of one within the bound of two orders of its sums."""

import math

import pytest

from tests.parallel.on_devices import found_by

LR = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_losses_and_models_are_those_of_one_device_and_a_run_resumes_bit_for_bit(kind, tmp_path):
    """A step of Adam moves a weight by at most its rate, so after one the masters lie at most two rates apart
    and the loss moves by at most that times the gradient's 1-norm, besides its sums' own bound."""
    found = found_by("_sft_on_mesh.py", kind, tmp_path, devices=2)
    print(found)
    own = found["logprob_bound"]
    moved = 2 * LR * found["grad_norm"] * math.sqrt(found["parameters"])
    for step, (one, mesh) in enumerate(zip(*found["losses"], strict=True)):
        assert one > 1 and abs(one - mesh) <= own + step * moved < 0.1 * one
    assert found["examples"][0] == found["examples"][1]
    assert found["models"] <= 2 * 2 * LR * (1 + 1e-3)
    assert found["resumed"]
