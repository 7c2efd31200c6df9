"""Sharding commutes: shards on 2, 4 and 8 simulated devices give the bytes of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4rl_jax

X = np.random.default_rng(0).standard_normal((64, 8, 512)).astype(np.float32)
X[40:, 5] *= 100  # the largest values sit in some shards only


def mesh(devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))


def split(axis: int) -> P:
    return P(*("d" if i == axis else None for i in range(3)))


@pytest.mark.fast_cases("0-8", "2-8", "2-fp32-4")
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    "axis, options",
    [(0, {}), (1, {}), (2, {}), (2, {"outer_rounding": "fp32"})],
    ids=["0", "1", "2", "2-fp32"],
)
def test_a_tensor_scale_is_reduced_over_the_shards(devices, axis, options):
    whole = fp4rl_jax.quantize(jnp.asarray(X), "nvfp4", **options)
    mapped = jax.shard_map(
        lambda x: fp4rl_jax.quantize(x, "nvfp4", axis_name="d", **options),
        mesh=mesh(devices),
        in_specs=split(axis),
        out_specs=whole.replace(packed=split(axis), scales=split(axis), outer_scale=P()),
    )(X)
    for ours, theirs in zip(jax.tree.leaves(mapped), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(
    "devices", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8]
)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_compiler_partitions_it_the_same_way(devices, axis):
    whole = fp4rl_jax.quantize(jnp.asarray(X), "nvfp4", block_shape="1x16")
    placed = jax.device_put(X, NamedSharding(mesh(devices), split(axis)))
    sharded = jax.jit(lambda x: fp4rl_jax.quantize(x, "nvfp4"))(placed)
    np.testing.assert_array_equal(np.asarray(sharded.packed), np.asarray(whole.packed))
    np.testing.assert_array_equal(np.asarray(sharded.scales), np.asarray(whole.scales))
    assert float(sharded.outer_scale) == float(whole.outer_scale)


def test_a_shard_quantized_alone_has_the_same_codes_and_values():
    """With a power-of-two outer scale its scale bytes differ by that power only."""
    whole = fp4rl_jax.quantize(jnp.asarray(X), "nvfp4")
    alone = fp4rl_jax.quantize(jnp.asarray(X[:32]), "nvfp4")
    assert float(alone.outer_scale) < float(whole.outer_scale)
    assert (alone.codes() == whole.codes()[:32]).all()
    assert (alone.dequantize() == whole.dequantize()[:32]).all()


@pytest.mark.parametrize("options", [{}, {"axis": 0, "block_shape": "16x16"}])
def test_a_shard_that_cuts_a_block_is_refused(options):
    with pytest.raises(
        ValueError, match=r"axis -\d of a shard has \d+ values, not a multiple of the block of 16"
    ):
        jax.shard_map(
            lambda x: fp4rl_jax.quantize(x, "nvfp4", axis_name="d", **options).packed,
            mesh=mesh(8),
            in_specs=split(2),
            out_specs=split(2),
        )(X[:, :, : 8 * 24])


def test_gradients_cross_shards_unchanged():
    def loss(x):
        return (fp4rl_jax.fake_quantize(x, "nvfp4", axis_name="d") ** 2).sum()

    mapped = jax.shard_map(jax.grad(loss), mesh=mesh(4), in_specs=split(2), out_specs=split(2))
    pulled = jax.jit(mapped)(X)
    np.testing.assert_array_equal(
        np.asarray(pulled), 2 * np.asarray(fp4rl_jax.fake_quantize(jnp.asarray(X), "nvfp4"))
    )
