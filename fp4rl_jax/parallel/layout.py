"""A layout: one mesh with its rules, as a static value that says where every array of a program lives.

Whoever has a layout asks it in logical axes. `None` stands for one device: nothing is placed and
nothing is constrained. Programs are global: XLA's partitioner splits them as the constraints say, and
an array means the same on every mesh.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp4rl_jax.arrays import PyTree
from fp4rl_jax.parallel.rules import BATCH, DEFAULT_RULES, Rules

Axes = Sequence[str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh and its rules; hashable, equal by value, so that it may be static under jit.

    Attributes:
        mesh: the devices.
        rules: where logical axes go.
    """

    mesh: Mesh
    rules: Rules = DEFAULT_RULES

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def gathered(self) -> "Layout":
        """The layout of parameters in use: those parts that fsdp stores apart are put together."""
        rules = dataclasses.replace(self.rules, model=())
        return dataclasses.replace(self, rules=rules)

    @property
    def rows_only(self) -> "Layout":
        """Rows and whole experts are shared out and nothing else is: no sum is ever split."""
        kept = {"batch": self.rules.batch, "experts": self.rules.experts}
        none = {field.name: () for field in dataclasses.fields(Rules) if field.name not in kept}
        return dataclasses.replace(self, rules=Rules(**none, **kept))

    def parts(self, name: str) -> int:
        """Over how many devices a dimension of this logical name is shared out."""
        return self.rules.parts(name, self.mesh)

    def sharding(self, axes: Axes, shape: Sequence[int]) -> NamedSharding:
        """Where an array goes whose first dimensions have these logical names.

        A dimension takes the longest run of its mesh axes that divides it; dimensions without a name
        stay whole. (Parameters must divide exactly, see `models.shardings`; this is for activations and
        small leaves such as scales.)
        """
        entries = []
        for name, size in zip(axes, shape, strict=False):
            taken: list[str] = []
            for axis in () if name is None else getattr(self.rules, name):
                if size % (self.mesh.shape[axis] * _product(self.mesh, taken)):
                    break
                taken.append(axis)
            entries.append(tuple(taken) or None)
        return NamedSharding(self.mesh, PartitionSpec(*entries))


def _product(mesh: Mesh, axes: Sequence[str]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))


def constrain(x: jax.Array, axes: Axes, layout: Layout | None) -> jax.Array:
    """Inside a program: puts `x` where its logical axes say; `x` itself without a layout."""
    return x if layout is None else jax.lax.with_sharding_constraint(x, layout.sharding(axes, x.shape))


def constrain_rows(tree: PyTree, layout: Layout | None) -> PyTree:
    """Inside a program: shares out the first dimension of every leaf."""
    return jax.tree.map(lambda leaf: constrain(leaf, BATCH, layout), tree)


def constrain_whole(tree: PyTree, layout: Layout | None) -> PyTree:
    """Inside a program: every device, hence every process, gets every leaf whole."""
    return jax.tree.map(lambda leaf: constrain(leaf, (), layout), tree)


def put_rows(tree: PyTree, layout: Layout | None) -> PyTree:
    """Places host values on the mesh, the first dimension of every leaf shared out, scalars whole.

    Args:
        tree: numpy or local jax arrays, typed keys included, equal in every process.
        layout: of the run; None leaves the tree as it is.

    Returns:
        Global arrays: each process holds the parts of its own devices.
    """
    return jax.tree.map(lambda leaf: _put(leaf, BATCH, layout), tree)


def put_whole(tree: PyTree, layout: Layout | None) -> PyTree:
    """`put_rows` with every leaf whole on every device."""
    return jax.tree.map(lambda leaf: _put(leaf, (), layout), tree)


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Places one host value, equal in every process, under a sharding of a mesh of all of them."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(leaf), NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    # copied: on a CPU jax takes memory over instead of copying it, and the caller may use it again
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def _put(leaf: Any, axes: Axes, layout: Layout | None) -> Any:
    return leaf if layout is None else put(leaf, layout.sharding(axes, leaf.shape))
