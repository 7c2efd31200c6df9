"""Mesh, logical-axis rules and the shardings that follow from them."""

from fp4rl_jax.parallel.mesh import MESH_AXES, MeshConfig, make_mesh
from fp4rl_jax.parallel.rules import (
    BATCH,
    DEFAULT_RULES,
    Rules,
    batch_sharding,
    named_sharding,
    replicated,
    shard_batch,
)

__all__ = [
    "BATCH",
    "DEFAULT_RULES",
    "MESH_AXES",
    "MeshConfig",
    "Rules",
    "batch_sharding",
    "make_mesh",
    "named_sharding",
    "replicated",
    "shard_batch",
]
