"""Facts of a machine, and the order of sums that it keeps."""

import pytest

from fp4rl_jax import config, models
from fp4rl_jax.cli import _job
from fp4rl_jax.ops import machine
from fp4rl_jax.ops.machine import Machine, require_order

H200 = Machine(platform="gpu", device_kind="NVIDIA H200", capability=(9, 0), narrow="bfloat16")
REFUSED = r'ops\.order = "fixed" on gpu \(NVIDIA H200\): .* on cpu only, expected ops\.order = "free"'


def test_a_fixed_order_is_for_cpus() -> None:
    require_order("fixed", Machine(platform="cpu"))
    require_order("free", H200)
    with pytest.raises(ValueError, match=REFUSED):
        require_order("fixed", H200)


def test_a_run_with_a_fixed_order_is_refused_on_a_gpu_before_a_weight_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "current", lambda: H200)
    with pytest.raises(ValueError, match=REFUSED):
        _job.builder(config.load([], ["ops.order=fixed", "model.shape.vocab_size=320"]))
    assert _job.sides(config.load([], ["ops.order=free"]), models.ModelConfig()).trainer.order == "free"
