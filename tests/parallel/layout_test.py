"""Layouts: where arrays go by their logical axes, what is placed from the host, what a program is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fp4rl_jax import formats, ops
from fp4rl_jax.parallel import (
    BATCH,
    Layout,
    MeshConfig,
    constrain,
    constrain_whole,
    make_mesh,
    put_rows,
    put_whole,
)
from fp4rl_jax.quantizers import Quantizer


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout(mesh=make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


def test_a_dimension_takes_the_mesh_axes_that_divide_it(layout):
    def spec(axes, shape):
        return layout.sharding(axes, shape).spec

    assert spec(("batch", None, "heads"), (8, 5, 4)) == PartitionSpec(("data", "fsdp"), None, "tensor")
    assert spec(("batch", None), (2, 5)) == PartitionSpec("data", None)
    assert spec(("batch", "heads"), (3, 7)) == PartitionSpec(None, None)
    assert spec(("layers", "heads", "model"), ()) == PartitionSpec()
    assert layout.gathered.sharding(("heads", "model"), (4, 4)).spec == PartitionSpec("tensor", None)
    assert layout.rows_only.sharding(("batch", "model"), (4, 4)).spec == PartitionSpec(("data", "fsdp"), None)
    assert hash(layout) == hash(Layout(mesh=make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))))


def test_host_values_are_placed_without_being_changed_or_kept(layout):
    host = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    given = {"x": host, "keys": jax.random.split(jax.random.key(3), 8), "version": jnp.int32(5), "none": None}
    placed = put_rows(given, layout)
    np.testing.assert_array_equal(placed["x"], np.arange(32.0).reshape(8, 4))
    assert {shard.data.shape for shard in placed["x"].addressable_shards} == {(2, 4)}
    assert placed["version"].sharding.is_fully_replicated and placed["none"] is None
    drawn = jax.jit(jax.vmap(jax.random.bits))(placed["keys"])
    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.bits)(given["keys"]))
    host[:] = -1
    assert float(jnp.min(placed["x"])) == 0
    assert put_whole(host, layout).sharding.is_fully_replicated
    assert put_rows(given, None)["x"] is host


def test_without_a_layout_nothing_is_constrained(layout):
    x = jnp.ones((8, 4))
    assert constrain(x, BATCH, None) is x and constrain_whole(x, None) is x
    spread = jax.jit(lambda x: constrain(x, BATCH, layout))(x)
    assert spread.sharding.spec == PartitionSpec(("data", "fsdp"))
    assert jax.jit(lambda x: constrain_whole(x, layout))(spread).sharding.is_fully_replicated


@pytest.mark.parametrize(
    "fmt", [formats.make("nvfp4", outer="row"), formats.make("nvfp4"), formats.make("mxfp4")]
)
def test_a_row_parallel_input_is_quantized_under_its_amax_over_tensor(layout, fmt, rng):
    """The largest value of every row lies in the other half of the columns: both halves get its scale."""
    x = rng.normal(size=(8, 256)).astype(np.float32)
    x[:, 200] = 3e4
    quantizer = Quantizer(fmt)
    split = layout.sharding(("batch", "ffn"), x.shape)
    assert split.spec == PartitionSpec(("data", "fsdp"), "tensor")
    program = jax.jit(lambda x: quantizer.quantize(x, axis=-1)).lower(jax.device_put(x, split)).compile()
    reduced = "all-reduce" in program.as_text()
    assert reduced == (fmt.span in ("row", "tensor"))
    found, whole = program(jax.device_put(x, split)), quantizer.quantize(jnp.asarray(x))
    jax.tree.map(np.testing.assert_array_equal, found, whole)
    assert found.packed.sharding.spec == split.spec


def test_a_weight_split_both_ways_has_the_codes_of_the_whole(layout, rng):
    w = rng.normal(size=(2, 64, 64)).astype(np.float32)
    w[0, 63, 63] = 100.0
    quantizer = Quantizer("nvfp4")
    place = layout.sharding(("layers", "heads", "model"), w.shape)
    found = jax.jit(lambda w: ops.quantize_weight(w, quantizer))(jax.device_put(w, place))
    jax.tree.map(np.testing.assert_array_equal, found, ops.quantize_weight(jnp.asarray(w), quantizer))
    assert found.scales.sharding.spec == PartitionSpec(None, "tensor", "fsdp")
