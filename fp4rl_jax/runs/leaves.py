"""A state pytree as named arrays on disk, bit for bit, through orbax.

The pytree is flattened to {path: array}, so what is on the disk does not depend on Python
classes, and a template that does not fit is refused by leaf name before any array is read.
Typed PRNG keys are stored as their key data; integers below one byte as bytes; empty arrays by
their shape alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import LogRecord
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from fp4rl_jax.arrays import PyTree
from fp4rl_jax.runs.errors import CheckpointError, storage_errors

# The array store has no such element types; a byte each holds them exactly.
_STORED_AS = {"int2": "int8", "uint2": "uint8", "uint4": "uint8", "int1": "int8", "uint1": "uint8"}

_KEY_BYTES = 16  # the widest key implementation (rbg)

Index = dict[str, dict[str, Any]]


def describe(state: PyTree) -> tuple[dict[str, Any], Index]:
    """Names every leaf of `state` by its path.

    Returns:
        (arrays to store by name, index of shape, dtype and key implementation by name).

    Raises:
        CheckpointError: a leaf is not an array, or two leaves share a name.
    """
    arrays, index = {}, {}
    for name, leaf in _named(state):
        index[name] = _entry(name, leaf)
        if index[name]["key"]:
            index[name]["key_impl"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        stored = _STORED_AS.get(index[name]["dtype"])
        if 0 not in leaf.shape:
            arrays[name] = leaf if stored is None else leaf.astype(stored)
    return arrays, index


def total_bytes(index: Index) -> int:
    """Upper bound of the bytes that the arrays take on disk, compression apart."""
    total = 0
    for entry in index.values():
        item = _KEY_BYTES if entry["key"] else jnp.dtype(entry["dtype"]).itemsize
        total += int(np.prod(entry["shape"], dtype=np.int64)) * item
    return total


def differences(index: Index, template: PyTree) -> list[str]:
    """What keeps a saved index from filling `template`, one phrase a leaf; empty if it fits."""
    wanted = {name: _entry(name, leaf) for name, leaf in _named(template)}
    found = [f"{name} is missing" for name in wanted if name not in index]
    found += [f"{name} is not wanted" for name in index if name not in wanted]
    for name in wanted:
        saved = index.get(name)
        if saved is not None and any(saved[field] != wanted[name][field] for field in ("shape", "dtype")):
            found.append(f"{name} is {_spell(saved)}, expected {_spell(wanted[name])}")
    return found


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Stores the arrays with orbax, which writes aside and renames.

    Raises:
        StorageError: the disk refused.
    """
    import orbax.checkpoint as ocp

    with storage_errors(path, doing="save a checkpoint"), _quiet(), _handler() as checkpointer:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpointer.save(path, ocp.args.PyTreeSave(arrays), force=True)


def read(path: Path, index: Index, template: PyTree) -> PyTree:
    """Reads every leaf of `template`, in the template's sharding where it has one."""
    import orbax.checkpoint as ocp

    named = _named(template)
    plans = {name: _restore_plan(index[name], leaf) for name, leaf in named if 0 not in leaf.shape}
    arrays = {}
    if plans:
        item = {name: asked for name, (asked, _) in plans.items()}
        how = {name: layout for name, (_, layout) in plans.items()}
        with _quiet(), _handler() as checkpointer:
            arrays = checkpointer.restore(path, ocp.args.PyTreeRestore(item, restore_args=how))
    # Popped one by one: the host copy of a leaf is gone before the next one is made.
    filled = [_finish(index[name], arrays.pop(name, None), leaf) for name, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(template), filled)


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    pairs = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise CheckpointError(f"two leaves of the state are named {name!r}")
        seen.add(name)
    return [(name or "state", leaf) for name, leaf in pairs]


def _entry(name: str, leaf: Any) -> dict[str, Any]:
    """One leaf's line of the index; `key` says whether it is a typed PRNG key."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        raise CheckpointError(
            f"state leaf {name} is a {type(leaf).__name__}, expected an array: plain values belong in `host`"
        )
    return {
        "shape": list(shape),
        "dtype": str(dtype),
        "key": bool(jnp.issubdtype(dtype, jax.dtypes.prng_key)),
    }


def _spell(entry: dict[str, Any]) -> str:
    return f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"


def _restore_plan(entry: dict[str, Any], leaf: Any) -> tuple[jax.ShapeDtypeStruct, Any]:
    """(what orbax is asked for, how it is to be laid out) for one leaf."""
    import orbax.checkpoint as ocp

    struct = jax.eval_shape(jax.random.key_data, leaf) if entry["key"] else leaf
    dtype = jnp.dtype(_STORED_AS.get(entry["dtype"], str(struct.dtype)))
    asked = jax.ShapeDtypeStruct(struct.shape, dtype)
    if _sharding(leaf) is None:
        return asked, ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    return asked, ocp.ArrayRestoreArgs(sharding=_sharding(leaf), global_shape=struct.shape, dtype=dtype)


def _sharding(leaf: Any) -> Any:
    """The sharding that a template leaf commits its values to; None for host or uncommitted ones."""
    if isinstance(leaf, jax.Array) and not leaf.committed:
        return None
    return getattr(leaf, "sharding", None)


def _finish(entry: dict[str, Any], stored: Any, leaf: Any) -> Any:
    """Gives a stored array back its logical dtype, key type and home."""
    if stored is None:
        stored = np.zeros(leaf.shape, leaf.dtype)
    elif entry["dtype"] in _STORED_AS:
        stored = stored.astype(entry["dtype"])
    if entry["key"]:
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=entry["key_impl"])
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(stored)
    return stored if isinstance(stored, jax.Array) else jnp.array(stored)


@contextmanager
def _handler() -> Iterator[Any]:
    """An orbax checkpointer, closed on the way out."""
    import orbax.checkpoint as ocp

    # Uncompressed: weights hardly shrink, and compressing holds a second copy of the state.
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
    try:
        yield checkpointer
    finally:
        checkpointer.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps orbax's own log (a traceback a thread on a refused write) out of ours meanwhile."""
    logger = logging.get_absl_logger()

    def drop(record: LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
