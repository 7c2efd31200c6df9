"""The device mesh: five named axes, each of which may have size 1."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices of the run, over all processes.

    One of them may be -1: it takes the devices that the others leave.

    Attributes:
        data: copies of the model, each with its share of the rows.
        fsdp: the rows are shared out likewise, and every parameter is stored in this many parts.
        tensor: heads, ffn columns and vocabulary are split.
        expert: the experts of a mixture are split.
        context: one sequence is split along time; 1, no operation splits one yet.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(MESH_AXES, self.sizes, strict=True):
            if size < 1 and size != -1:
                raise ValueError(f"mesh axis {axis!r} must be at least 1, or -1 for the rest, got {size}")
        if self.sizes.count(-1) > 1:
            raise ValueError(f"one mesh axis may be -1, got {self.spelled}")

    def validate(self, root: Any) -> None:
        """Refuses what no device is needed to refuse; ValueError naming axis and numbers."""
        if self.context != 1:
            raise ValueError(
                f"context = {self.context}: attention over a sequence split along time does not exist, "
                "expected 1"
            )
        parts = self.data * self.fsdp
        if parts > 0:
            require_rows(root, parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of MESH_AXES."""
        return (self.data, self.fsdp, self.tensor, self.expert, self.context)

    @property
    def spelled(self) -> str:
        """`data=2 x fsdp=1 x ...`, for messages."""
        return " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes; of resolved sizes."""
        return math.prod(self.sizes)

    def resolve(self, num_devices: int) -> Self:
        """The same mesh with -1 replaced by what `num_devices` leave.

        Raises:
            ValueError: the sizes do not multiply to `num_devices`.
        """
        known = math.prod(size for size in self.sizes if size != -1)
        if -1 not in self.sizes:
            if known != num_devices:
                raise ValueError(f"the mesh {self.spelled} takes {known} devices, there are {num_devices}")
            return self
        rest, over = divmod(num_devices, known)
        if over or not rest:
            raise ValueError(
                f"the mesh {self.spelled} takes a multiple of {known} devices, there are {num_devices}"
            )
        return dataclasses.replace(self, **{MESH_AXES[self.sizes.index(-1)]: rest})


def require_rows(root: Any, parts: int) -> None:
    """Refuses rows that do not divide over the devices that share them out.

    Args:
        root: the whole configuration.
        parts: data * fsdp.

    Raises:
        ValueError: naming the key, its value and the parts.
    """
    trainer, loop = root.trainer, root.loop
    batch = loop.num_prompts // trainer.updates_per_rollout * loop.group_size
    key, rows = "loop.num_prompts / trainer.updates_per_rollout * loop.group_size", batch
    if trainer.microbatch_rows is not None:
        key, rows = "trainer.microbatch_rows", trainer.microbatch_rows
    if rows % parts:
        raise ValueError(f"{key} = {rows} rows do not divide over data * fsdp = {parts} devices")


def make_mesh(config: MeshConfig, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays the devices out as the five-axis mesh.

    Args:
        config: sizes of the axes.
        devices: which devices, in order; all devices of all processes by default.

    Raises:
        ValueError: the product of the sizes is not the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    sizes = config.resolve(len(found)).sizes
    return Mesh(np.array(found, dtype=object).reshape(sizes), MESH_AXES)
