"""The one description of every leaf, and what follows from it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from fp4rl_jax import models
from fp4rl_jax.parallel import MeshConfig, make_mesh
from tests.models.oracle import TINY, random_params

SMOLLM2 = models.ModelConfig(
    vocab_size=49152, num_layers=30, d_model=576, num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536,
    rope_theta=1e5, max_length=8192,
)  # fmt: skip


def test_smollm2_has_its_134515008_parameters():
    assert models.num_parameters(SMOLLM2) == 134_515_008
    leaves = jax.tree.leaves(models.abstract_params(SMOLLM2))
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) == 134_515_008


@pytest.mark.parametrize("family", list(TINY))
def test_all_trees_have_one_structure(family, rng):
    config = TINY[family]
    abstract = models.abstract_params(config, dtype="bfloat16")
    made = jax.eval_shape(partial(models.init_params, config, dtype="bfloat16"), jax.random.key(0))
    given = random_params(config, rng)
    assert jax.tree.structure(abstract) == jax.tree.structure(made) == jax.tree.structure(given)
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, made) == jax.tree.map(np.shape, given)
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("bfloat16")}
    assert models.num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(made))


def test_initialisation_is_keyed_and_smaller_into_the_residual_stream(key):
    config = models.ModelConfig(d_model=128, num_layers=8)
    init = jax.jit(partial(models.init_params, config))
    one, two, other = init(key), init(key), init(jax.random.key(1))
    np.testing.assert_array_equal(one["embed"], two["embed"])
    assert not np.array_equal(one["embed"], other["embed"])
    assert not np.array_equal(one["layers"]["mlp"]["gate"], one["layers"]["mlp"]["up"])
    assert np.std(one["layers"]["attn"]["q"]) == pytest.approx(0.02, rel=0.02)
    assert np.std(one["layers"]["mlp"]["down"]) == pytest.approx(0.02 / 4, rel=0.02)
    assert np.all(one["final_norm"] == 1.0)


@pytest.mark.parametrize("family", list(TINY))
def test_fuse_joins_along_the_output_axis(family, rng):
    config = TINY[family]
    params = random_params(config, rng)
    fused = models.fuse(params)
    attn, mix = params["layers"]["attn"], "moe" if config.num_experts else "mlp"
    joint = np.concatenate([attn["q"], attn["k"], attn["v"]], axis=1)
    np.testing.assert_array_equal(fused["layers"]["attn"]["qkv"], joint)
    pair = params["layers"][mix]
    np.testing.assert_array_equal(
        fused["layers"][mix]["gate_up"], np.concatenate([pair["gate"], pair["up"]], axis=-2)
    )
    if config.qkv_bias:
        biases = np.concatenate([attn["q_bias"], attn["k_bias"], attn["v_bias"]], axis=1)
        np.testing.assert_array_equal(fused["layers"]["attn"]["qkv_bias"], biases)
    again = models.fuse(fused)
    assert jax.tree.structure(again) == jax.tree.structure(fused)
    seen = []
    models.map_sites(lambda site, weight: seen.append((site, weight.ndim)) or weight, fused)
    assert tuple(site for site, _ in seen) == models.sites(config)
    assert [rank for _, rank in seen] == [3, 3, 4, 4] if config.num_experts else [3, 3, 3, 3]


def test_split_layers_and_its_refusals(rng):
    params = random_params(TINY["llama"], rng)
    split = models.split_layers(params, 2)
    below, above = split["layers"]
    np.testing.assert_array_equal(
        np.concatenate([below["attn"]["q"], above["attn"]["q"]]), params["layers"]["attn"]["q"]
    )
    assert models.fuse(split)["layers"][1]["mlp"]["gate_up"].shape == (1, 96, 32)
    with pytest.raises(ValueError, match=r"cannot split 3 layers at 3: expected 1\.\.2"):
        models.split_layers(params, 3)
    with pytest.raises(ValueError, match="already split into 2 stacks"):
        models.split_layers(split, 1)


def test_shardings_follow_the_axes_of_each_leaf():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, expert=2))
    config = dataclasses.replace(TINY["qwen3_moe"], vocab_size=64, num_experts=6)
    found = models.shardings(config, mesh)
    assert jax.tree.structure(found) == jax.tree.structure(models.abstract_params(config))
    assert found["embed"].spec == PartitionSpec(("tensor",), ("fsdp",))
    assert found["layers"]["attn"]["q"].spec == PartitionSpec(None, ("tensor",), ("fsdp",))
    assert found["layers"]["moe"]["down"].spec == PartitionSpec(None, ("expert",), ("fsdp",), ("tensor",))


def test_dimensions_that_do_not_divide_are_named():
    mesh = make_mesh(MeshConfig(tensor=2), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="embed: axis 'vocab' of size 61 does not divide over 2 devices"):
        models.shardings(TINY["llama"], mesh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, r"num_heads \(4\) is not a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 7}, "head_dim must be even for RoPE, got 7"),
        ({"num_experts": 4, "num_active": 5, "d_expert": 8}, r"num_active must be in 1\.\.4, got 5"),
        ({"num_experts": 4, "num_active": 2}, "needs d_expert >= 1, got 0"),
        ({"family": "lama"}, "did you mean 'llama'"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        models.ModelConfig(**change)
