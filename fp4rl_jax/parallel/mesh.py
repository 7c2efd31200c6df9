"""The device mesh: five named axes, each of which may have size 1."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

MESH_AXES = ("data", "fsdp", "tensor", "expert", "context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used.

    Attributes:
        data: copies of the model, each with its share of the prompts.
        fsdp: the batch is shared out likewise, and every parameter is stored in this many parts.
        tensor: heads, ffn columns and vocabulary are split.
        expert: the experts of a mixture are split.
        context: one sequence is split along time.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis, size in zip(MESH_AXES, self.sizes, strict=True):
            if size < 1:
                raise ValueError(f"mesh axis {axis!r} must be at least 1, got {size}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of MESH_AXES."""
        return (self.data, self.fsdp, self.tensor, self.expert, self.context)

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes."""
        return int(np.prod(self.sizes))


def make_mesh(config: MeshConfig, *, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays the devices out as the five-axis mesh.

    Args:
        config: sizes of the axes.
        devices: which devices, in order; all visible ones by default.

    Raises:
        ValueError: the product of the sizes is not the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    if config.num_devices != len(found):
        asked = " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, config.sizes, strict=True))
        raise ValueError(f"the mesh {asked} takes {config.num_devices} devices, there are {len(found)}")
    return Mesh(np.array(found, dtype=object).reshape(config.sizes), MESH_AXES)
