"""What a checkpoint file format offers the loader: names, shapes and one tensor at a time."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What the file says of a tensor: its shape (row-major) and the name of its stored type."""

    shape: tuple[int, ...]
    dtype: str


class Source(Protocol):
    """A checkpoint opened for reading; reading one tensor leaves the others on disk."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Fills `out` (the tensor's shape) with its values, rounded to out's dtype."""
        ...
