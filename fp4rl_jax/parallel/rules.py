"""Logical axis -> mesh axis: what each dimension of an array means decides where it lives.

A parameter's description names its dimensions ("heads", "model", ...); a rule maps each name to
a mesh axis, to several, or to None (replicated). Nothing else in the project names a mesh axis.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4rl_jax.arrays import PyTree, check_name, unknown_name
from fp4rl_jax.parallel.mesh import MESH_AXES

#: Logical axes of arrays whose rows are sequences or prompts.
BATCH = ("batch",)

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Where each logical axis goes; an empty tuple replicates it.

    Attributes:
        batch: sequences, prompts, tokens.
        layers: the stacked layers that `scan` walks over.
        vocab, model, heads, kv_heads, head_dim, ffn: V, D, H*C, K*C, C, F of the axis alphabet.
        experts, expert_ffn: E and an expert's F.
        router: E of the router, which every token needs whole.
    """

    batch: MeshAxes = ("data", "fsdp")
    layers: MeshAxes = ()
    vocab: MeshAxes = ("tensor",)
    model: MeshAxes = ("fsdp",)
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    head_dim: MeshAxes = ()
    ffn: MeshAxes = ("tensor",)
    experts: MeshAxes = ("expert",)
    expert_ffn: MeshAxes = ("tensor",)
    router: MeshAxes = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                check_name("mesh axis", axis, MESH_AXES)

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition spec of an array whose dimensions have these logical names.

        Args:
            axes: one logical name for each dimension; None for a dimension that stays whole.

        Raises:
            ValueError: a name is unknown, or two dimensions want the same mesh axis.
        """
        known = {field.name for field in dataclasses.fields(self)}
        taken: dict[str, str] = {}
        entries = []
        for name in axes:
            if name is not None and name not in known:
                raise unknown_name("logical axis", name, known)
            mesh_axes: MeshAxes = () if name is None else getattr(self, name)
            for axis in mesh_axes:
                if axis in taken:
                    raise ValueError(
                        f"logical axes {taken[axis]!r} and {name!r} of one array {tuple(axes)} "
                        f"both map to mesh axis {axis!r}"
                    )
                taken[axis] = str(name)
            entries.append(mesh_axes or None)
        return PartitionSpec(*entries)

    def parts(self, name: str, mesh: Mesh) -> int:
        """Over how many devices of `mesh` a dimension of this logical name is shared out."""
        return math.prod(mesh.shape[axis] for axis in getattr(self, name))


DEFAULT_RULES = Rules()


def named_sharding(mesh: Mesh, axes: Sequence[str | None], *, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """The sharding on `mesh` of an array whose dimensions have these logical names."""
    return NamedSharding(mesh, rules.spec(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, *, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """The sharding of an array whose first dimension is sequences or prompts."""
    return named_sharding(mesh, BATCH, rules=rules)


def shard_batch(batch: PyTree, mesh: Mesh, *, rules: Rules = DEFAULT_RULES) -> PyTree:
    """Places a batch on the mesh: rows are shared out, scalars are replicated.

    Args:
        batch: pytree of arrays whose first dimension is rows, or scalars.

    Raises:
        ValueError: the rows of a leaf do not divide over the devices that share them.
    """
    sharding = batch_sharding(mesh, rules=rules)
    parts = rules.parts("batch", mesh)

    def place(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 0:
            return jax.device_put(leaf, replicated(mesh))
        if leaf.shape[0] % parts:
            raise ValueError(f"{leaf.shape[0]} rows do not divide over {parts} devices ({rules.batch})")
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, batch)
