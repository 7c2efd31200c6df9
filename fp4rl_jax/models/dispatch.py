"""Which rows the grouped matmuls of a mixture see, and where: sorted by expert, and back to the tokens.

On one device the rows are a sort of all choices. Where the mesh shares experts out (`mesh.expert` above
1), tokens are shared out over the same devices and travel to the owners of their experts by all-to-all
(`parallel.exchange`). A row is computed by its expert's weight alone on either road, so it has the same
bits wherever a row's sum does not depend on other rows (`order = "fixed"`).
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops.spec import MatmulSpec, Order, Side
from fp4rl_jax.parallel import Exchange, Layout


class Dispatch(Protocol):
    """The rows of one layer's choices."""

    @property
    def group_sizes(self) -> Array:
        """int32, rows of each expert (of each device); they sum to the rows that are computed."""
        ...

    @property
    def counted(self) -> Array:
        """[R] bool, rows that are a real token's choice."""
        ...

    def rows(self, tree: PyTree) -> PyTree:
        """Leaves [M, ...] of the tokens as [R, ...] of the rows."""
        ...

    def back(self, rows: Array) -> Array:
        """[R, N] as [M, A, N]: the choices of every token, zeros for padding."""
        ...

    def matmul(
        self, x: Array, weight: PyTree, spec: MatmulSpec, *, order: Order, key: Array | None, hint: PyTree
    ) -> Array:
        """`ops.grouped_matmul` of rows [R, K] and weights [E, N, K]: [R, N]."""
        ...


def dispatch(chosen: Array, *, num_experts: int, side: Side) -> Dispatch:
    """The road that the side's layout asks for.

    Args:
        chosen: [M, A] int32, the experts of every token; `num_experts` on padding.
        num_experts: E. side: static.
    """
    if side.layout is not None and side.layout.parts("experts") > 1:
        return Exchanged.of(chosen, num_experts=num_experts, layout=side.layout)
    return Sorted.of(chosen, num_experts=num_experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sorted:
    """Rows [M * A], sorted by expert, padding after the last expert.

    Attributes:
        by_expert: [R] int32, the choice of each row. active: A.
        group_sizes, counted: as in `Dispatch`.
    """

    by_expert: Array
    active: int
    group_sizes: Array
    counted: Array

    @classmethod
    def of(cls, chosen: Array, *, num_experts: int) -> "Sorted":
        """Sorts the choices [M, A]."""
        flat = chosen.reshape(-1)
        sizes = jnp.bincount(flat, length=num_experts + 1)[:-1].astype(jnp.int32)
        return cls(
            by_expert=jnp.argsort(flat, stable=True),
            active=chosen.shape[1],
            group_sizes=sizes,
            counted=jnp.arange(flat.size) < jnp.sum(sizes),
        )

    def rows(self, tree: PyTree) -> PyTree:
        """As in `Dispatch`."""
        source = self.by_expert // self.active  # the token of each row
        return jax.tree.map(lambda leaf: _only(leaf[source], self.counted), tree)

    def back(self, rows: Array) -> Array:
        """As in `Dispatch`."""
        return _only(rows, self.counted)[jnp.argsort(self.by_expert)].reshape(-1, self.active, rows.shape[-1])

    def matmul(
        self, x: Array, weight: PyTree, spec: MatmulSpec, *, order: Order, key: Array | None, hint: PyTree
    ) -> Array:
        """As in `Dispatch`."""
        return ops.grouped_matmul(x, weight, self.group_sizes, spec, order=order, key=key, hint=hint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchanged:
    """Rows on the devices that own their experts.

    Attributes:
        exchange: the plan.
    """

    exchange: Exchange

    @classmethod
    def of(cls, chosen: Array, *, num_experts: int, layout: Layout) -> "Exchanged":
        """Plans the exchange of the choices [M, A]."""
        return cls(exchange=Exchange.of(chosen, num_groups=num_experts, layout=layout))

    @property
    def group_sizes(self) -> Array:
        """As in `Dispatch`."""
        return self.exchange.group_sizes

    @property
    def counted(self) -> Array:
        """As in `Dispatch`."""
        return self.exchange.counted

    def rows(self, tree: PyTree) -> PyTree:
        """As in `Dispatch`."""
        return self.exchange.send(tree)

    def back(self, rows: Array) -> Array:
        """As in `Dispatch`."""
        return self.exchange.back(rows)

    def matmul(
        self, x: Array, weight: PyTree, spec: MatmulSpec, *, order: Order, key: Array | None, hint: PyTree
    ) -> Array:
        """As in `Dispatch`; every device draws random bits of its own.

        What a quantizer takes from all rows of a call (an outer scale of a tensor, blocks along the tokens)
        it takes here from a device's rows.
        """
        grid = self.exchange.grid
        weight, specs = _shared_out(weight, self.exchange)
        rows = PartitionSpec(grid.axes)

        def run(x: Array, weight: PyTree, sizes: Array, key: Array | None, hint: PyTree) -> Array:
            if key is not None:
                key = jax.random.fold_in(key, jax.lax.axis_index(grid.axes))
            return ops.grouped_matmul(x, weight, sizes, spec, order=order, key=key, hint=hint)

        args = (x, weight, self.group_sizes, key, hint)
        return grid.over_devices(run, *args, specs=(rows, specs, rows, PartitionSpec(), rows))


def _shared_out(weight: PyTree, exchange: Exchange) -> tuple[PyTree, PyTree]:
    """A stack of experts over its owners; what calibration chose is the same for all experts."""
    if not isinstance(weight, ops.Calibrated):
        return exchange.grid.shared_out(weight)
    inner, specs = exchange.grid.shared_out(weight.weight)
    whole = jax.tree.map(lambda _: PartitionSpec(), weight)
    return dataclasses.replace(weight, weight=inner), dataclasses.replace(whole, weight=specs)


def _only(leaf: Array, counted: Array) -> Array:
    return jnp.where(counted.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))
