"""Decoders: tokens to hidden states, logits and log-probabilities."""

from fp4rl_jax.models.config import FAMILIES, ModelConfig, MoeConfig, RopeScaling, num_parameters, sites
from fp4rl_jax.models.kv import KV, cache_width, new_cache
from fp4rl_jax.models.logprobs import (
    Scores,
    logits,
    pick_logprobs,
    score,
    score_packed,
    tempered,
    token_logprobs,
)
from fp4rl_jax.models.params import (
    Leaf,
    abstract_params,
    describe,
    fuse,
    head_weight,
    init_params,
    map_sites,
    map_stacks,
    prepare,
    shardings,
    site_shapes,
    split_layers,
)
from fp4rl_jax.models.placement import (
    constrain_params,
    in_use,
    leaf_axes,
    params_shardings,
    require_whole_blocks,
)
from fp4rl_jax.models.sequences import positions_of
from fp4rl_jax.models.transformer import Forward, GroupForward, forward, forward_groups

__all__ = [
    "FAMILIES",
    "KV",
    "Forward",
    "GroupForward",
    "Leaf",
    "ModelConfig",
    "MoeConfig",
    "RopeScaling",
    "Scores",
    "abstract_params",
    "cache_width",
    "constrain_params",
    "describe",
    "forward",
    "forward_groups",
    "fuse",
    "head_weight",
    "in_use",
    "init_params",
    "leaf_axes",
    "logits",
    "map_sites",
    "map_stacks",
    "new_cache",
    "num_parameters",
    "params_shardings",
    "pick_logprobs",
    "positions_of",
    "prepare",
    "require_whole_blocks",
    "score",
    "score_packed",
    "shardings",
    "site_shapes",
    "sites",
    "split_layers",
    "tempered",
    "token_logprobs",
]
