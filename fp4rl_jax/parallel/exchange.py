"""All-to-all between the devices of one mesh axis: rows to the owners of their groups, and back.

Groups (experts) lie in equal runs on the devices that share them out, the last run filled up with groups
that nobody takes where their number does not divide. Tokens lie on all devices that share out rows or
groups, the last ones filled up with tokens that take nothing where theirs does not. Every device sorts
its choices by group, cuts them by owner, and the devices of one line along the groups' axes exchange the
parts; there the rows are sorted by group again.

Nothing is dropped, and under jit a buffer has one size: room for the worst case, in which all tokens of a
line choose the groups of one device. A token takes distinct groups, so of its A choices at most min(A, own
groups) land on one device, and each device receives `devices of a line * own tokens * min(A, own groups)`
rows: for A = 1 as many as an all-gather of the line's tokens would bring.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.parallel.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Who exchanges what; static.

    Attributes:
        layout: the mesh and its rules.
        num_groups: groups that exist. num_tokens: M, over all devices. active: A, choices of a token.
    """

    layout: Layout
    num_groups: int
    num_tokens: int
    active: int

    @property
    def line(self) -> tuple[str, ...]:
        """Mesh axes that share out the groups; devices along them exchange rows."""
        return self.layout.rules.experts

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that share out the tokens; those of the groups come last."""
        return tuple(axis for axis in self.layout.rules.batch if axis not in self.line) + self.line

    @property
    def num_owners(self) -> int:
        """Devices of a line."""
        return self.layout.parts("experts")

    @property
    def num_devices(self) -> int:
        """Devices among which the tokens are shared out."""
        return math.prod(self.layout.mesh.shape[axis] for axis in self.axes)

    @property
    def own_groups(self) -> int:
        """Groups of a device, those that only fill up included."""
        return -(-self.num_groups // self.num_owners)

    @property
    def own_tokens(self) -> int:
        """Tokens of a device, those that only fill up included."""
        return -(-self.num_tokens // self.num_devices)

    @property
    def capacity(self) -> int:
        """Most rows that one device can send to another."""
        return self.own_tokens * min(self.active, self.own_groups)

    @property
    def own_rows(self) -> int:
        """Rows of a device's receive buffer."""
        return self.num_owners * self.capacity

    def buffer_bytes(self, width: int, itemsize: int) -> int:
        """Bytes that one device's received rows of `width` values take."""
        return self.own_rows * width * itemsize

    def over_devices(self, function: Callable[..., Any], *args: Any, specs: Any = None) -> Any:
        """Runs `function` on every device's parts of `args`; its results are shared out in the same way.

        Axes of the mesh that share out neither tokens nor groups stay with the partitioner.

        Args:
            specs: partition specs of the arguments; by default all are shared out among all devices.
        """
        everywhere = PartitionSpec(self.axes)
        run = jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=everywhere if specs is None else specs,
            out_specs=everywhere,
            axis_names=set(self.axes),
            check_vma=False,  # a weight's gradient is summed over the devices that share it, as specs say
        )
        return run(*args)

    def shared_out(self, stack: PyTree) -> tuple[PyTree, PyTree]:
        """Leaves [groups, ...], filled up with zeros to whole runs, and their partition specs."""
        missing = self.own_groups * self.num_owners - self.num_groups

        def fill(leaf: Array) -> Array:
            return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1)) if missing else leaf

        return jax.tree.map(fill, stack), jax.tree.map(lambda _: PartitionSpec(self.line), stack)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange of one set of choices; rows on all devices together are [R], R = devices * own rows.

    Attributes:
        grid: static.
        slots: [M filled up * A] int32: where in its device's send buffer a choice lies; the buffer's
            length for choices of nothing.
        order: [R] int32: which received row a device's sorted row is.
        group_sizes: [devices * own groups] int32: rows of every group on every device.
        counted: [R] bool: rows that are a choice.
    """

    grid: Grid
    slots: Array
    order: Array
    group_sizes: Array
    counted: Array

    @classmethod
    def of(cls, chosen: Array, *, num_groups: int, layout: Layout) -> Self:
        """Plans the exchange.

        Args:
            chosen: [M, A] int32: the groups of every token, distinct; `num_groups` is none.
            num_groups: groups that exist. layout: the mesh and its rules.
        """
        grid = Grid(layout=layout, num_groups=num_groups, num_tokens=chosen.shape[0], active=chosen.shape[1])
        nowhere = grid.num_owners * grid.own_groups
        chosen = jnp.where(chosen < num_groups, chosen, nowhere).astype(jnp.int32)
        filled = _filled(chosen, grid, value=nowhere)
        slots, order, sizes, counted = grid.over_devices(functools.partial(_plan, grid), filled)
        return cls(grid=grid, slots=slots, order=order, group_sizes=sizes, counted=counted)

    def send(self, tree: PyTree) -> PyTree:
        """Every token's leaves [M, ...] at the owners of its groups: [R, ...], zeros where nothing is."""
        tree = jax.tree.map(lambda leaf: _filled(leaf, self.grid, value=0), tree)
        return self.grid.over_devices(functools.partial(_send, self.grid), tree, self.slots, self.order)

    def back(self, rows: Array) -> Array:
        """What the owners made of the rows, [R, N], at the tokens again: [M, A, N]; zeros for no choice."""
        rows = jnp.where(self.counted[:, None], rows, 0)
        found = self.grid.over_devices(functools.partial(_back, self.grid), rows, self.slots, self.order)
        return found[: self.grid.num_tokens]


def _filled(leaf: Array, grid: Grid, *, value: int) -> Array:
    missing = grid.own_tokens * grid.num_devices - grid.num_tokens
    if not missing:
        return leaf
    return jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1), constant_values=value)


def _exchanged(buffer: Array, grid: Grid) -> Array:
    """Part i of this device's buffer [owners * capacity, ...] for device i's part of this one's number."""
    return jax.lax.all_to_all(buffer, grid.line, split_axis=0, concat_axis=0, tiled=True)


def _plan(grid: Grid, chosen: Array) -> tuple[Array, Array, Array, Array]:
    """One device's slots, order of received rows, sizes of its groups and counted rows."""
    flat = chosen.reshape(-1)  # [m * A]
    by_group = jnp.argsort(flat, stable=True)
    owner = flat[by_group] // grid.own_groups
    first = jnp.searchsorted(owner, jnp.arange(grid.num_owners + 1))
    place = owner * grid.capacity + jnp.arange(flat.size) - first[owner]
    place = jnp.where(owner < grid.num_owners, place, grid.own_rows).astype(jnp.int32)
    slots = jnp.zeros_like(flat).at[by_group].set(place)
    sent = jnp.full(grid.own_rows, grid.own_groups, jnp.int32)
    group = _exchanged(sent.at[slots].set(flat % grid.own_groups, mode="drop"), grid)
    sizes = jnp.bincount(group, length=grid.own_groups + 1)[:-1].astype(jnp.int32)
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    return slots, order, sizes, jnp.arange(grid.own_rows) < jnp.sum(sizes)


def _send(grid: Grid, tree: PyTree, slots: Array, order: Array) -> PyTree:
    nobody = grid.own_tokens
    token = jnp.arange(slots.size, dtype=jnp.int32) // grid.active
    token = jnp.full(grid.own_rows, nobody, jnp.int32).at[slots].set(token, mode="drop")

    def one(leaf: Array) -> Array:
        sent = jnp.take(leaf, token, axis=0, mode="fill", fill_value=0)
        return jnp.take(_exchanged(sent, grid), order, axis=0)

    return jax.tree.map(one, tree)


def _back(grid: Grid, rows: Array, slots: Array, order: Array) -> Array:
    received = jnp.take(rows, jnp.argsort(order), axis=0)
    own = jnp.take(_exchanged(received, grid), slots, axis=0, mode="fill", fill_value=0)
    return own.reshape(-1, grid.active, rows.shape[-1])
