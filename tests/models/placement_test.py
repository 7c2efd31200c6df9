"""Where parameters live on a mesh, whatever form they are in, and the splits that are refused."""

import dataclasses

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

from fp4rl_jax import models
from fp4rl_jax.ops.spec import MatmulSpec, Side, SiteSpecs
from fp4rl_jax.parallel import Layout, MeshConfig, make_mesh
from fp4rl_jax.quantizers import Quantizer
from fp4rl_jax.rollout import abstract_published
from fp4rl_jax.trainer import OptimConfig, TrainerConfig, abstract_state, plan

DENSE = models.ModelConfig(
    vocab_size=64, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128,
    qkv_bias=True, family="qwen2", tie_embeddings=False,
)  # fmt: skip
MIXTURE = models.ModelConfig(
    family="qwen3_moe", vocab_size=64, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16,
    qk_norm=True, num_experts=4, num_active=2, d_expert=64,
)  # fmt: skip


def layout(**sizes: int) -> Layout:
    return Layout(mesh=make_mesh(MeshConfig(**sizes)))


def side(config: models.ModelConfig, where: Layout | None, **spec) -> Side:
    items = tuple((site, MatmulSpec(**spec)) for site in models.sites(config))
    return Side(specs=SiteSpecs(items=items), dtype="float32", layout=where)


def specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


def test_a_state_and_its_moments_follow_the_description():
    where = layout(data=2, fsdp=2, tensor=2)
    shapes = models.abstract_params(DENSE)
    subset = plan(shapes, ("layers/1/*", "head"), num_layers=2)
    state = abstract_state(shapes, subset, TrainerConfig(optim=OptimConfig(clip_norm=None)))
    found = specs(models.params_shardings(state, DENSE, where))
    q = PartitionSpec(None, "tensor", "fsdp")
    assert found.trainable["layers/above/attn/q"] == found.frozen["layers/below/attn/q"] == q
    assert found.trainable["head"] == found.frozen["embed"] == PartitionSpec("tensor", "fsdp")
    assert found.trainable["layers/above/attn/k_bias"] == PartitionSpec(None, "tensor")
    moments = optax.tree.get(found.opt_state, "mu")
    assert moments["layers/above/mlp/down"] == PartitionSpec(None, "fsdp", "tensor")
    assert found.updates == found.params_version == PartitionSpec()


def test_published_leaves_lie_where_their_masters_do():
    where = layout(data=2, tensor=2, expert=2)
    rollout = side(MIXTURE, where, weight=Quantizer("nvfp4"))
    shapes = models.abstract_params(MIXTURE)
    made = abstract_published(shapes, config=MIXTURE, side=rollout).params
    found = specs(models.params_shardings(made, MIXTURE, where))
    down = found["layers"]["moe"]["down"]
    assert down.packed == down.scales == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert down.outer_scale == PartitionSpec(None, "expert")
    assert found["layers"]["moe"]["gate_up"].packed == PartitionSpec(None, "expert", "tensor", "fsdp")
    assert found["layers"]["attn"]["qkv"].packed == PartitionSpec(None, "tensor", "fsdp")
    assert found["layers"]["attn"]["qkv"].outer_scale == PartitionSpec(None)


@pytest.mark.parametrize(
    ("config", "sizes", "spec", "message"),
    [
        (
            DENSE,
            {"fsdp": 4, "tensor": 2},
            {"weight": Quantizer("mxfp4")},
            r"trainer attn/qkv: weights in blocks of 32 along axis 'model' of size 64: "
            r"4 devices of mesh axis fsdp would cut a block",
        ),
        (
            DENSE,
            {"data": 4, "tensor": 2},
            {"act": Quantizer("hif4")},
            r"trainer attn/out: activations in blocks of 64 along axis 'heads' of size 64: "
            r"2 devices of mesh axis tensor would cut a block",
        ),
        (
            dataclasses.replace(MIXTURE, d_expert=96),
            {"data": 2, "tensor": 2, "expert": 2},
            {"weight": Quantizer("mxfp4")},
            r"trainer experts/down: weights in blocks of 32 along axis 'expert_ffn' of size 96",
        ),
        (
            DENSE,
            {"data": 4, "tensor": 2},
            {"weight": Quantizer("nvfp4"), "grad": Quantizer("hif4"), "backward": "requantized"},
            r"trainer attn/qkv: gradients in blocks of 64 along axis 'heads' of size 64",
        ),
        (DENSE, {"data": 2, "tensor": 4}, {}, r"2 kv_heads do not divide over 4 devices of mesh axis tensor"),
    ],
)  # fmt: skip
def test_a_split_that_would_cut_a_block_or_a_head_is_refused(config, sizes, spec, message):
    with pytest.raises(ValueError, match=message):
        models.require_whole_blocks(config, side(config, layout(**sizes), **spec), name="trainer")
    models.require_whole_blocks(config, side(config, None, **spec), name="trainer")


def test_whole_blocks_pass():
    where = layout(data=2, fsdp=2, tensor=2)
    models.require_whole_blocks(DENSE, side(DENSE, where, weight=Quantizer("nvfp4")), name="rollout")
    uneven = dataclasses.replace(MIXTURE, d_expert=96)  # a ragged last block is cut by nobody
    models.require_whole_blocks(
        uneven, side(uneven, layout(data=4, expert=2), act=Quantizer("hif4")), name="rollout"
    )
