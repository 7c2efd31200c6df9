"""Mesh and axis rules: shapes, refusals, placement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fp4rl_jax.parallel import (
    MESH_AXES,
    MeshConfig,
    Rules,
    batch_sharding,
    make_mesh,
    named_sharding,
    shard_batch,
)


def test_mesh_has_five_named_axes_of_the_asked_sizes():
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 4, "expert": 1, "context": 1}


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="takes 6 devices, there are 8"):
        make_mesh(MeshConfig(data=2, fsdp=3))
    with pytest.raises(ValueError, match="mesh axis 'expert' must be at least 1, or -1 for the rest, got 0"):
        MeshConfig(expert=0)
    assert make_mesh(MeshConfig(data=2), devices=jax.devices()[:2]).size == 2


def test_one_axis_takes_the_devices_that_the_others_leave():
    assert MeshConfig(fsdp=-1, tensor=2).resolve(8) == MeshConfig(fsdp=4, tensor=2)
    assert make_mesh(MeshConfig(data=-1, tensor=2)).shape["data"] == 4
    with pytest.raises(ValueError, match="fsdp=-1 x tensor=3 .* takes a multiple of 3 devices, there are 8"):
        MeshConfig(fsdp=-1, tensor=3).resolve(8)
    with pytest.raises(ValueError, match="one mesh axis may be -1, got data=-1 x fsdp=-1"):
        MeshConfig(data=-1, fsdp=-1)


def test_rules_name_mesh_axes_and_refuse_a_collision():
    rules = Rules()
    assert rules.spec(("layers", "heads", "model")) == PartitionSpec(None, ("tensor",), ("fsdp",))
    assert rules.spec((None, "batch")) == PartitionSpec(None, ("data", "fsdp"))
    with pytest.raises(ValueError, match="'heads' and 'ffn' .* both map to mesh axis 'tensor'"):
        rules.spec(("heads", "ffn"))
    with pytest.raises(ValueError, match="did you mean 'heads'"):
        rules.spec(("head",))
    with pytest.raises(ValueError, match="did you mean 'tensor'"):
        Rules(heads=("tensors",))


def test_batches_are_shared_out_over_data_and_fsdp():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rows = jnp.arange(24.0).reshape(8, 3)
    placed = shard_batch({"rows": rows, "version": jnp.int32(3)}, mesh)
    np.testing.assert_array_equal(placed["rows"], rows)
    assert placed["rows"].sharding == batch_sharding(mesh)
    assert {shard.data.shape for shard in placed["rows"].addressable_shards} == {(2, 3)}
    assert placed["version"].sharding.is_fully_replicated
    with pytest.raises(ValueError, match="6 rows do not divide over 4 devices"):
        shard_batch(rows[:6], mesh)


def test_a_named_sharding_cuts_the_named_dimension():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    weight = jax.device_put(jnp.zeros((6, 8)), named_sharding(mesh, ("heads", "model")))
    assert {shard.data.shape for shard in weight.addressable_shards} == {(3, 2)}
