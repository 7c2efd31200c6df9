"""Safetensors files, read by mapping: an 8-byte length, a JSON header, then raw little-endian data.

Read here and not by the `safetensors` package (which writes them), so that a damaged file is
reported by the tensor it loses and values go from the map straight into the stacked leaf.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.source import TensorInfo

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}


class SafetensorsFile:
    """One safetensors file, its header decoded and its data mapped.

    Attributes:
        path: the file.
        tensors: name -> `TensorInfo`.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            CheckpointError: the header is damaged, a tensor's span does not fit its shape and dtype,
                its dtype is not one of F32, BF16, F16, or the file ends before it.
        """
        self.path = path
        self._size = path.stat().st_size
        header, self._start = self._header()
        self.tensors = {
            name: TensorInfo(tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()
        }
        self._offsets = {name: self._checked(name, entry["data_offsets"]) for name, entry in header.items()}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def _header(self) -> tuple[dict, int]:
        with self.path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if 8 + length > self._size or length < 2:
                raise CheckpointError(
                    f"{self.path} is truncated or not a safetensors file: its header needs {8 + length} "
                    f"bytes, the file has {self._size}"
                )
            text = stream.read(length)
        try:
            header = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: the safetensors header is damaged: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the safetensors header is damaged: not a mapping")
        header.pop("__metadata__", None)
        for name, entry in header.items():
            self._check_entry(name, entry)
        return header, 8 + length

    def _check_entry(self, name: str, entry: Any) -> None:
        found = entry if isinstance(entry, dict) else {}
        shape, offsets = found.get("shape"), found.get("data_offsets")
        numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
        whole = all(isinstance(number, int) and number >= 0 for number in numbers)
        if not whole or len(offsets or ()) != 2 or not isinstance(found.get("dtype"), str):
            raise CheckpointError(
                f"{self.path}: the safetensors header is damaged at tensor {name!r}: {entry!r}, expected "
                "dtype, shape and data_offsets"
            )

    def _checked(self, name: str, offsets: list[int]) -> tuple[int, int]:
        shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has dtype {dtype}, expected one of {', '.join(DTYPES)} "
                "(an unquantized checkpoint)"
            )
        first, last = offsets
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if last - first != size:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has {last - first} bytes, expected {size} for {dtype} of "
                f"shape {list(shape)}"
            )
        if self._start + last > self._size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} needs bytes {self._start + first}.."
                f"{self._start + last}, the file has {self._size}"
            )
        return self._start + first, self._start + last

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copies one tensor into `out`, rounding to its dtype."""
        first, last = self._offsets[name]
        raw = self._bytes[first:last].view(DTYPES[self.tensors[name].dtype])
        np.copyto(out, raw.reshape(out.shape), casting="unsafe")
