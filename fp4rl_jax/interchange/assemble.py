"""From tensors on disk to the stacked master tree, one tensor at a time."""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from fp4rl_jax.arrays import PyTree, dtype_of
from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.naming import Piece, leaf_paths, pieces
from fp4rl_jax.interchange.source import Source
from fp4rl_jax.models import ModelConfig, describe
from fp4rl_jax.parallel import put

#: Reading threads: copying and dequantizing release the interpreter lock, two keep two cores busy.
_THREADS = 2


def assemble(
    source: Source, config: ModelConfig, *, names: Mapping[str, str], dtype: str, shardings: PyTree | None
) -> PyTree:
    """Checks every tensor of `source` against the model, then reads them into stacked leaves.

    Each leaf is filled tensor by tensor in one staging buffer and moved to the device before the next
    is begun, so host memory peaks at one copy of the model and one leaf.

    Args:
        source: an opened checkpoint.
        config: the model that it must be.
        names: the format's table, leaf path -> tensor name.
        dtype: master dtype of every leaf, "float32" or "bfloat16"; values are rounded to nearest even.
        shardings: a tree of shardings like the master tree, or None for the default device.

    Returns:
        The master tree, jax arrays.

    Raises:
        CheckpointError: a tensor is missing, unexpected or misshapen (nothing is read), or cannot be
            decoded.
    """
    described = describe(config)
    wanted = {path: pieces(path, leaf, names=names) for path, leaf in leaf_paths(described)}
    _check_tensors(source, [piece for group in wanted.values() for piece in group])
    target = np.dtype(dtype_of(dtype))
    places = dict(leaf_paths(shardings)) if shardings is not None else {}
    staging = _Staging(max(math.prod(leaf.shape) for _, leaf in leaf_paths(described)) * target.itemsize)

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:

        def build(path: str, shape: tuple[int, ...]) -> jax.Array:
            stacked = staging.view(shape, target)
            list(pool.map(lambda piece: source.read_into(piece.name, stacked[piece.index]), wanted[path]))
            place = places.get(path)
            leaf = jax.device_put(stacked) if place is None else put(stacked, place)
            return leaf.block_until_ready()

        leaves = [build(path, leaf.shape) for path, leaf in leaf_paths(described)]
    return jax.tree.structure(described).unflatten(leaves)


class _Staging:
    """Host memory for one leaf at a time, never adopted by jax.

    On CPU, jax takes a 64-byte-aligned numpy buffer over instead of copying it; whether malloc aligns
    one is chance, and an adopted buffer cannot be donated later. This one is misaligned on purpose.
    """

    def __init__(self, num_bytes: int) -> None:
        memory = np.empty(num_bytes + 64, np.uint8)
        self._bytes = memory[(32 - memory.ctypes.data) % 64 :]

    def view(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _check_tensors(source: Source, wanted: list[Piece]) -> None:
    found = source.tensors
    missing = [piece.name for piece in wanted if piece.name not in found]
    if missing:
        raise CheckpointError(
            f"{source.path}: tensor {_some(missing)} missing, expected by the configuration"
        )
    expected = {piece.name for piece in wanted}
    extra = [name for name in found if name not in expected]
    if extra:
        raise CheckpointError(
            f"{source.path}: tensor {_some(extra)} in the file, but the configuration has no place for it"
        )
    for piece in wanted:
        shape = found[piece.name].shape
        if shape != piece.shape:
            raise CheckpointError(
                f"{source.path}: tensor {piece.name!r} has shape {list(shape)}, expected {list(piece.shape)}"
            )


def _some(names: list[str]) -> str:
    """The first three names, the number of the others, and the verb."""
    shown = ", ".join(map(repr, names[:3]))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"


def same_values(source: Source, first: str, second: str) -> bool:
    """Whether two tensors of a checkpoint hold the same values (float32, bit for bit)."""
    shapes = [source.tensors[name].shape for name in (first, second)]
    if shapes[0] != shapes[1]:
        return False
    values = [np.empty(shape, np.float32) for shape in shapes]
    source.read_into(first, values[0])
    source.read_into(second, values[1])
    return np.array_equal(values[0].view(np.uint32), values[1].view(np.uint32))
