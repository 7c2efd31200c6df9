"""Mesh, logical-axis rules and the shardings that follow from them."""

from fp4rl_jax.parallel.exchange import Exchange
from fp4rl_jax.parallel.layout import (
    Layout,
    constrain,
    constrain_rows,
    constrain_whole,
    put,
    put_rows,
    put_whole,
)
from fp4rl_jax.parallel.mesh import MESH_AXES, MeshConfig, make_mesh, require_rows
from fp4rl_jax.parallel.processes import (
    HEARTBEAT_SECONDS,
    ProcessError,
    Processes,
    largest,
    of_first,
    start,
)
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
    "HEARTBEAT_SECONDS",
    "MESH_AXES",
    "Exchange",
    "Layout",
    "MeshConfig",
    "ProcessError",
    "Processes",
    "Rules",
    "batch_sharding",
    "constrain",
    "constrain_rows",
    "constrain_whole",
    "largest",
    "make_mesh",
    "named_sharding",
    "of_first",
    "put",
    "put_rows",
    "put_whole",
    "replicated",
    "require_rows",
    "shard_batch",
    "start",
]
