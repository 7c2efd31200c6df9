"""The mesh that a run is given: none on one device, or all the devices that are there, or a refusal."""

from pathlib import Path

import jax
import pytest

from fp4rl_jax.cli import _devices, _job
from fp4rl_jax.config import load

CI = str(Path(__file__).parents[2] / "configs/ci/grpo.toml")


def layout(*overrides: str):
    return _devices.layout(load([CI], list(overrides)))


def test_the_default_takes_one_device_whatever_others_there_are():
    assert len(jax.devices()) == 8 and layout() is None


def test_a_mesh_takes_all_devices():
    found = layout("mesh.data=2", "mesh.fsdp=-1", "mesh.tensor=2")
    assert found is not None and dict(found.mesh.shape) == {
        "data": 2, "fsdp": 2, "tensor": 2, "expert": 1, "context": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.data=2"], "data=2 .* takes 2 devices, there are 8"),
        (["mesh.data=-1", "loop.num_prompts=3"], "= 12 rows do not divide over data \\* fsdp = 8 devices"),
        (["mesh.data=-1", "trainer.microbatch_rows=4"], "trainer.microbatch_rows = 4 rows do not divide"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        layout(*overrides)


def test_a_split_that_cuts_a_block_is_refused_before_weights_are_made():
    config = load([CI], ["mesh.fsdp=8", "recipe.name=qat_w4a4"])
    refused = "trainer attn/qkv: weights in blocks of 16 along axis 'model' of size 64: 8 devices"
    with pytest.raises(ValueError, match=refused):
        _job.builder(config, _devices.layout(config))
