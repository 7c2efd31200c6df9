"""Atomic, complete, verified checkpoints on orbax.

A checkpoint of step s is the folder `checkpoints/<s, 8 digits>/` and holds the state before step
s is run (s steps are done):

    state/         orbax: one array a leaf, named by its path in the state pytree
    leaves.json    every leaf's shape, dtype, and key implementation for typed PRNG keys
    host.json      the caller's plain values (data position, config, ...)
    commit.json    the commit marker: size and SHA-256 of every file above, and its own digest

Everything is written and synced under `<step>.tmp`, the marker last, and the folder is then
renamed into place. A folder is a checkpoint only if its marker is there and every digest agrees,
so a kill at any instant leaves the previous checkpoint as it was.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from absl import logging

from fp4rl_jax.arrays import PyTree
from fp4rl_jax.runs import commit, leaves
from fp4rl_jax.runs.errors import (
    CheckpointError,
    NoCheckpointError,
    StorageError,
    WrongCheckpointError,
    storage_errors,
)
from fp4rl_jax.runs.files import dump_json, fsync_directory, plain_value, read_json, write_atomically

_NAME = re.compile(r"(\d{8})(\.old)?")
_STATE, _LEAVES, _HOST = "state", "leaves.json", "host.json"


@dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` returns.

    Attributes:
        step: steps done before the checkpoint was taken; the next step to run.
        state: the state pytree, laid out as the template asked.
        host: the plain values that were saved beside it.
        path: the folder it came from.
        passed_over: one line for each later checkpoint that was damaged or half-written.
    """

    step: int
    state: PyTree
    host: dict[str, Any]
    path: Path
    passed_over: tuple[str, ...] = ()


class Checkpointer:
    """Saves and restores the checkpoints of one run.

    Args:
        root: the folder of the checkpoints; made when missing.
        keep_last: how many of the latest to keep, at least 1.
        keep_best: name of the metric whose highest `score` keeps one more; "" keeps none.
        score: gives the value of the `keep_best` metric at the time of a save, or None.
        fingerprint: identifies the configuration that the checkpoints belong to; "" is not compared.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int = 2,
        keep_best: str = "",
        score: Callable[[], float | None] | None = None,
        fingerprint: str = "",
    ):
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self.root = Path(root).absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.fingerprint = fingerprint
        self._score = score
        self._passed_over: set[Path] = set()
        with storage_errors(self.root, doing="make the checkpoint folder"):
            self.root.mkdir(parents=True, exist_ok=True)

    def steps(self) -> tuple[int, ...]:
        """Steps that have a committed folder (digests not checked), ascending."""
        return tuple(sorted({step for step, _ in self._candidates()}))

    def save(self, step: int, state: PyTree, host: Mapping[str, Any]) -> Path:
        """Saves a checkpoint; when this returns it is on the disk and will be restored.

        Args:
            step: steps done so far, 0 or more.
            state: pytree of jax or numpy arrays, typed PRNG keys included.
            host: plain JSON values.

        Returns:
            The checkpoint's folder.

        Raises:
            StorageError: the disk refused; every earlier checkpoint is kept.
            CheckpointError: a leaf is no array.
        """
        if not 0 <= step < 10**8:
            raise CheckpointError(f"a checkpoint's step must be in 0..99999999, got {step}")
        named, index = leaves.describe(state)
        final = self.root / f"{step:08d}"
        temporary = self.root / f"{step:08d}.tmp"
        primary = jax.process_index() == 0
        if primary:
            self._clear_leftovers()
        self._require_space(leaves.total_bytes(index))
        _barrier("fp4rl_checkpoint_begin")
        try:
            leaves.write(temporary / _STATE, named)
            if primary:
                marker = {
                    "step": step,
                    "score": None if self._score is None else self._score(),
                    "score_name": self.keep_best,
                    "fingerprint": self.fingerprint,
                }
                self._commit(temporary, marker=marker, index=index, host=host)
                self._move_into_place(temporary, final)
        except (StorageError, CheckpointError):
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _barrier("fp4rl_checkpoint_end")
        if primary:
            self._prune(step)
        return final

    def restore(self, template: PyTree, *, step: int | None = None) -> Restored:
        """Restores the latest sound checkpoint, or the one of `step`.

        Args:
            template: the state's pytree of arrays or `jax.ShapeDtypeStruct`s; a leaf's sharding,
                where it has one, is the sharding that the restored array gets.
            step: restore exactly this one.

        Raises:
            NoCheckpointError: none is sound; the message names each and what is wrong with it.
            WrongCheckpointError: the checkpoint holds other leaves, shapes or dtypes.
        """
        path, passed_over = self._latest_sound(step)
        marker = commit.read(path)
        self._require_fingerprint(path, marker)
        index = read_json(path / _LEAVES)
        differences = leaves.differences(index, template)
        if differences:
            shown = "; ".join(differences[:4]) + (
                f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            )
            raise WrongCheckpointError(f"checkpoint {path} does not fit this configuration: {shown}")
        state = leaves.read(path / _STATE, index, template)
        return Restored(marker["step"], state, read_json(path / _HOST), path, passed_over)

    def latest_host(self) -> dict[str, Any] | None:
        """The host values of the latest sound checkpoint, or None if there is none."""
        try:
            path, _ = self._latest_sound(None)
        except NoCheckpointError:
            return None
        return read_json(path / _HOST)

    def _latest_sound(self, step: int | None) -> tuple[Path, tuple[str, ...]]:
        """The newest folder whose digests agree, and a line for each one passed over."""
        passed_over = [f"{path}: half-written (no commit marker)" for path in sorted(self.root.glob("*.tmp"))]
        for line in passed_over:
            logging.warning("checkpoint %s; it is ignored", line)
        for number, path in self._candidates():
            if step is not None and number != step:
                continue
            problem = commit.problem(path)
            if problem is None:
                return path, tuple(passed_over)
            passed_over.append(f"{path}: {problem}")
            self._passed_over.add(path)
            logging.warning("checkpoint %s is damaged (%s); trying the one before it", path, problem)
        what = "no sound checkpoint" if step is None else f"no sound checkpoint of step {step}"
        raise NoCheckpointError(
            f"{what} in {self.root}" + (f": {'; '.join(passed_over)}" if passed_over else "")
        )

    def _candidates(self) -> list[tuple[int, Path]]:
        """(step, folder) of everything that was renamed into place, newest first."""
        found = []
        for path in self.root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), match[2] is None, path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _require_fingerprint(self, path: Path, marker: Mapping[str, Any]) -> None:
        """Refuses a sound checkpoint that another configuration wrote."""
        saved = marker["fingerprint"]
        if self.fingerprint and saved and saved != self.fingerprint:
            raise WrongCheckpointError(
                f"checkpoint {path} belongs to another configuration: "
                f"fingerprint {saved[:12]}, expected {self.fingerprint[:12]}"
            )

    def _require_space(self, needed: int) -> None:
        """Refuses before writing when the disk plainly cannot hold the state uncompressed."""
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise StorageError(
                f"cannot save a checkpoint at {self.root}: it needs {needed / 1e9:.3g} GB and "
                f"{free / 1e9:.3g} GB are free; earlier checkpoints are kept"
            )

    def _commit(
        self, folder: Path, *, marker: dict[str, Any], index: dict[str, Any], host: Mapping[str, Any]
    ) -> None:
        with storage_errors(folder, doing="save a checkpoint"):
            write_atomically(folder / _LEAVES, dump_json(index))
            write_atomically(folder / _HOST, dump_json(plain_value(host)))
            commit.write(folder, marker)

    def _move_into_place(self, temporary: Path, final: Path) -> None:
        """Renames; an older folder of the same step steps aside first and stays restorable."""
        old = final.with_name(f"{final.name}.old")
        with storage_errors(final, doing="save a checkpoint"):
            if final.exists():
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            temporary.rename(final)
            fsync_directory(self.root)
        self._passed_over.discard(final)

    def _clear_leftovers(self) -> None:
        for path in (*self.root.glob("*.tmp"), *self.root.glob("*.gone")):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Deletes what the new checkpoint makes superfluous: renamed first, so never half there.

        What lies after `step` belongs to a future that was rewound, and damaged ones count as none.
        """
        candidates = self._candidates()
        sound = [
            path for s, path in candidates if s <= step and path not in self._passed_over and not path.suffix
        ]
        keep = {*sound[: self.keep_last], *self._best(sound)}
        for _, path in candidates:
            if path not in keep:
                self._delete(path)
        self._passed_over.clear()

    def _delete(self, path: Path) -> None:
        """Removes a superfluous checkpoint; the new one is safe already, so a refusal is only logged."""
        gone = path.with_name(f"{path.name}.gone")
        try:
            path.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            logging.warning("superfluous checkpoint %s cannot be deleted: %s", path, error.strerror)

    def _best(self, paths: list[Path]) -> list[Path]:
        """The folder with the highest score of the metric `keep_best`, the later of equals; or none."""
        if not self.keep_best:
            return []
        scored = []
        for path in paths:
            marker = commit.read(path)
            if marker["score"] is not None and marker["score_name"] == self.keep_best:
                scored.append((marker["score"], path.name, path))
        return [max(scored)[2]] if scored else []


def _barrier(name: str) -> None:
    """Waits for every process; nothing to wait for in a run of one."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
