"""Host memory that a device reads by itself: where arrays wait that its own memory has no room for."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from fp4rl_jax.arrays import PyTree
from fp4rl_jax.parallel.layout import Axes, Layout, constrain, put

#: jax's name of the kind: pages that stay where they are, so that a device copies them while it computes.
HOST = "pinned_host"


def require_host_memory(device: Any) -> None:
    """Refuses a device that reads no host memory of its own accord.

    Raises:
        ValueError: naming the device, the kinds of memory that it has, and the one expected.
    """
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise ValueError(
            f"device {device.device_kind!r} has memory of kind {', '.join(kinds)}: expected {HOST} among them"
        )


def put_in_host(tree: PyTree, axes: Axes, layout: Layout | None) -> PyTree:
    """Places host values in the host memory of the devices that will read them.

    Args:
        tree: numpy arrays, equal in every process.
        axes: logical axes of every leaf's first dimensions.
        layout: of the run; None takes the default device's.
    """

    def one(leaf: Any) -> jax.Array:
        if layout is None:
            return jax.device_put(leaf, SingleDeviceSharding(jax.devices()[0], memory_kind=HOST))
        return put(leaf, layout.sharding(axes, leaf.shape).with_memory_kind(HOST))

    return jax.tree.map(one, tree)


def fetched(tree: PyTree, axes: Axes, layout: Layout | None) -> PyTree:
    """Inside a program: leaves of host memory on the devices, where their logical axes say."""

    def one(leaf: jax.Array) -> jax.Array:
        return constrain(jax.device_put(leaf, jax.memory.Space.Device), axes, layout)

    return jax.tree.map(one, tree)
