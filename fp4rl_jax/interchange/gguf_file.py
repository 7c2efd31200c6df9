"""GGUF files: the header read in one pass, tensors dequantized one at a time by the `gguf` package.

The package's own reader makes an array object for every token and merge of the vocabulary, several
seconds for 49,152 tokens; this one makes Python strings. Block types and dequantization are the
package's. Layout: magic, version, counts, key/value pairs, tensor records, padding, tensor data.
"""

import math
import struct
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import quants

from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.source import TensorInfo

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}
_PLAIN = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_MAX_RANK = 4  # of the format
_VALUES_AT_ONCE = 1 << 20  # elements dequantized per step: keeps the float32 temporaries in cache


class GGUFFile:
    """One GGUF file, its header decoded and its data mapped.

    Attributes:
        path: the file.
        metadata: key -> value; scalars, strings and lists of them.
        tensors: name -> `TensorInfo` (shape in row-major order, block type as dtype).
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the header.

        Raises:
            FileNotFoundError: no such file.
            CheckpointError: not a little-endian GGUF of version 2 or 3, or it ends before what its
                header promises; the message names the first tensor that is cut off.
        """
        self.path = Path(path)
        if self.path.stat().st_size == 0:
            raise CheckpointError(f"{self.path} is empty, expected a GGUF file")
        self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self.path, memoryview(self._bytes))
        num_tensors, num_pairs = _preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value()
        records = [_record(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two")
        start = -(-cursor.offset // alignment) * alignment
        self.tensors = {name: TensorInfo(shape, kind.name) for name, shape, kind, _ in records}
        self._spans = {name: self._span(start, name, shape, kind, at) for name, shape, kind, at in records}

    def _span(
        self, start: int, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, offset: int
    ) -> tuple[gguf.GGMLQuantizationType, int, int]:
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has rows of {shape[-1]} values, expected a multiple of "
                f"{kind.name}'s block of {block}"
            )
        first, size = start + offset, math.prod(shape) // block * block_bytes
        if first + size > self._bytes.size:
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name!r} needs bytes {first}..{first + size}, the file "
                f"has {self._bytes.size}"
            )
        return kind, first, size

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Dequantizes one tensor into `out` (same shape; any float dtype, rounded to nearest even).

        Raises:
            CheckpointError: the `gguf` package cannot dequantize this block type.
        """
        kind, first, size = self._spans[name]
        rows = math.prod(out.shape[:-1])
        raw = self._bytes[first : first + size].reshape(rows, -1)
        target = out.reshape(rows, -1)
        if not np.shares_memory(target, out):
            raise ValueError(f"reading {name!r} needs a contiguous destination, got strides {out.strides}")
        decode = self._decoder(name, kind)
        step = max(1, _VALUES_AT_ONCE // target.shape[1])
        for row in range(0, rows, step):
            np.copyto(target[row : row + step], decode(raw[row : row + step]), casting="unsafe")

    def _decoder(self, name: str, kind: gguf.GGMLQuantizationType) -> Callable[[np.ndarray], np.ndarray]:
        if kind in _PLAIN:
            return lambda raw: raw.view(_PLAIN[kind])
        if kind in _FAST:
            return _FAST[kind]
        return lambda raw: self._by_package(name, kind, raw)

    def _by_package(self, name: str, kind: gguf.GGMLQuantizationType, raw: np.ndarray) -> np.ndarray:
        try:
            return quants.dequantize(raw, kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as {kind.name}, which the gguf package cannot "
                "dequantize"
            ) from error


class _Cursor:
    """Reads little-endian values in order; running over the end is a CheckpointError."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path, self.view, self.offset = path, view, 0

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self.view):
            raise CheckpointError(
                f"{self.path} is truncated: its header needs byte {end}, the file has {len(self.view)}"
            )
        piece, self.offset = self.view[self.offset : end], end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        piece = self.take(self.scalar("Q"))
        try:
            return str(piece, encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: the text before byte {self.offset} is damaged") from error

    def kind[K: IntEnum](self, kinds: type[K]) -> K:
        raw = self.scalar("I")
        if raw not in set(kinds):
            raise CheckpointError(f"{self.path}: {raw} before byte {self.offset} is no {kinds.__name__}")
        return kinds(raw)

    def value(self) -> Any:
        kind = self.kind(gguf.GGUFValueType)
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.kind(gguf.GGUFValueType), self.scalar("Q")
        if item == _STRING:
            return [self.string() for _ in range(count)]
        if item == _ARRAY:
            raise CheckpointError(f"{self.path}: an array of arrays before byte {self.offset}")
        code = _SCALARS[item]
        piece = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", piece))


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    magic = bytes(cursor.take(4))
    if magic != _MAGIC:
        raise CheckpointError(f"{cursor.path} starts with {magic!r}, expected {_MAGIC!r}: not a GGUF file")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{cursor.path}: GGUF version {version}, expected one of {_VERSIONS} in little-endian order"
        )
    return cursor.scalar("Q"), cursor.scalar("Q")


def _record(cursor: _Cursor) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name, rank = cursor.string(), cursor.scalar("I")
    if not 1 <= rank <= _MAX_RANK:
        raise CheckpointError(f"{cursor.path}: tensor {name!r} has {rank} axes, expected 1 to {_MAX_RANK}")
    shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]  # stored fastest axis first
    return name, shape, cursor.kind(gguf.GGMLQuantizationType), cursor.scalar("Q")


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """[rows, blocks * 20] uint8 -> [rows, blocks * 32] float32: d * nibble + m, low nibbles first."""
    blocks = raw.reshape(raw.shape[0], -1, 20)
    scale, low = np.moveaxis(blocks[..., :4].copy().view(np.float16).astype(np.float32), -1, 0)
    nibbles = blocks[..., 4:]
    values = np.empty((*nibbles.shape[:2], 32), np.float32)
    np.bitwise_and(nibbles, 15, out=values[..., :16], casting="unsafe")
    np.right_shift(nibbles, 4, out=values[..., 16:], casting="unsafe")
    values *= scale[..., None]
    values += low[..., None]
    return values.reshape(raw.shape[0], -1)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """[rows, blocks * 34] uint8 -> [rows, blocks * 32] float32: d * int8."""
    blocks = raw.reshape(raw.shape[0], -1, 34)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    return (blocks[..., 2:].view(np.int8) * scale).reshape(raw.shape[0], -1)


#: The package's arithmetic without its step of 16 rows; tests hold them equal bit for bit.
_FAST = {gguf.GGMLQuantizationType.Q4_1: _q4_1, gguf.GGMLQuantizationType.Q8_0: _q8_0}
