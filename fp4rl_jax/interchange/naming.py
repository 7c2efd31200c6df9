"""Which tensors of a file make up which leaf of the master tree, for each file format.

A leaf of the master tree is addressed by its keys joined with "/". A per-layer leaf is stacked on
disk one layer at a time; an expert leaf one layer, or one layer and expert, at a time.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax

from fp4rl_jax.arrays import PyTree
from fp4rl_jax.models import Leaf
from fp4rl_jax.models.config import Family

HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "layers/attn_norm": "model.layers.{layer}.input_layernorm.weight",
    "layers/attn/q": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers/attn/k": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers/attn/v": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers/attn/out": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers/attn/q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers/attn/k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers/attn/v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "layers/attn/q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers/attn/k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers/mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers/mlp/gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers/mlp/up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers/mlp/down": "model.layers.{layer}.mlp.down_proj.weight",
    "layers/moe/router": "model.layers.{layer}.mlp.gate.weight",
    "layers/moe/gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers/moe/up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "layers/moe/down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}

_MIXTRAL_MOE = "model.layers.{layer}.block_sparse_moe"
MIXTRAL_NAMES = HF_NAMES | {
    "layers/moe/router": f"{_MIXTRAL_MOE}.gate.weight",
    "layers/moe/gate": f"{_MIXTRAL_MOE}.experts.{{expert}}.w1.weight",
    "layers/moe/up": f"{_MIXTRAL_MOE}.experts.{{expert}}.w3.weight",
    "layers/moe/down": f"{_MIXTRAL_MOE}.experts.{{expert}}.w2.weight",
}


def hf_names(family: Family) -> dict[str, str]:
    """The table of a released family's Hugging Face tensors."""
    return MIXTRAL_NAMES if family == "mixtral" else HF_NAMES


GGUF_NAMES = {
    "embed": "token_embd.weight",
    "layers/attn_norm": "blk.{layer}.attn_norm.weight",
    "layers/attn/q": "blk.{layer}.attn_q.weight",
    "layers/attn/k": "blk.{layer}.attn_k.weight",
    "layers/attn/v": "blk.{layer}.attn_v.weight",
    "layers/attn/out": "blk.{layer}.attn_output.weight",
    "layers/attn/q_bias": "blk.{layer}.attn_q.bias",
    "layers/attn/k_bias": "blk.{layer}.attn_k.bias",
    "layers/attn/v_bias": "blk.{layer}.attn_v.bias",
    "layers/attn/q_norm": "blk.{layer}.attn_q_norm.weight",
    "layers/attn/k_norm": "blk.{layer}.attn_k_norm.weight",
    "layers/mlp_norm": "blk.{layer}.ffn_norm.weight",
    "layers/mlp/gate": "blk.{layer}.ffn_gate.weight",
    "layers/mlp/up": "blk.{layer}.ffn_up.weight",
    "layers/mlp/down": "blk.{layer}.ffn_down.weight",
    "layers/moe/router": "blk.{layer}.ffn_gate_inp.weight",
    "layers/moe/gate": "blk.{layer}.ffn_gate_exps.weight",
    "layers/moe/up": "blk.{layer}.ffn_up_exps.weight",
    "layers/moe/down": "blk.{layer}.ffn_down_exps.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor on disk: `leaf[index]` of the leaf at `path`, of shape `shape`."""

    path: str
    name: str
    index: tuple[int, ...]
    shape: tuple[int, ...]


def leaf_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf of a master tree, in tree order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(keys, simple=True, separator="/"), leaf) for keys, leaf in flat]


def pieces(path: str, leaf: Leaf, *, names: Mapping[str, str]) -> list[Piece]:
    """The tensors that make up one leaf under a table of names, in stacking order."""
    template = names[path]
    fields = [field for field in ("layer", "expert") if f"{{{field}}}" in template]
    counts = leaf.shape[: len(fields)]
    return [
        Piece(
            path, template.format(**dict(zip(fields, index, strict=True))), index, leaf.shape[len(fields) :]
        )
        for index in itertools.product(*map(range, counts))
    ]
