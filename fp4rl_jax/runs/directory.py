"""A run's folder: who may open it, what is in it, and how it is put back for a resume."""

import fcntl
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from fp4rl_jax.runs import files
from fp4rl_jax.runs.checkpoints import Checkpointer
from fp4rl_jax.runs.config import RunConfig
from fp4rl_jax.runs.errors import (
    ConfigMismatchError,
    RunBusyError,
    RunError,
    RunExistsError,
    RunNotFoundError,
    storage_errors,
)
from fp4rl_jax.runs.manifest import manifest_changes
from fp4rl_jax.runs.metrics import MetricsWriter, UnwrittenMetrics

#: Dotted keys that a resumed run may change; a trailing ".*" allows a whole section.
MAY_CHANGE = (
    "loop.steps",
    "mesh.*",
    *(
        f"run.{name}"
        for name in (
            "name",
            "root",
            "resume",
            "checkpoint_every",
            "keep_last",
            "keep_best",
            "transcripts_every",
            "transcripts_per_step",
            "tensorboard",
            "progress",
        )
    ),
)

CONFIG, MANIFEST, CHECKPOINTS = "config.json", "manifest.json", "checkpoints"
METRICS, EVALS, TRANSCRIPTS = "metrics.jsonl", "evals.jsonl", "transcripts.jsonl"


class RunDirectory:
    """One run on disk, held by this process until `close`.

    Make one with `open`; then restore from `checkpoints` if it is `resumed` and there are any, call
    `start(step)` and `write_manifest`, and use `metrics`, `write_transcripts` and `write_eval` until
    `close`. Usable as a context manager.

    Attributes:
        path: the folder.
        config: the `run` section it was opened with.
        resumed: whether it held a run already.
        checkpoints: its `Checkpointer`.
        metrics: the metrics writer; there after `start`.
    """

    metrics: MetricsWriter

    def __init__(self, config: RunConfig, *, resumed: bool, lock: int, fingerprint: str):
        self.path = config.path
        self.config = config
        self.resumed = resumed
        self._lock = lock
        self._open: list[Any] = []
        self.checkpoints = Checkpointer(
            self.path / CHECKPOINTS,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            score=self._best_score,
            fingerprint=fingerprint,
        )

    @classmethod
    def open(
        cls, config: RunConfig, *, resolved: Mapping[str, Any], may_change: Iterable[str] = MAY_CHANGE
    ) -> Self:
        """Opens the folder of `config` for a new run or for a resumed one, as `config.resume` says.

        With several processes each of them opens it; process 0 alone writes its records.

        Args:
            config: the `run` section.
            resolved: the whole configuration as plain JSON values; saved as config.json.
            may_change: dotted keys in which a resumed run may differ from the saved one.

        Raises:
            RunExistsError, RunNotFoundError: the folder is not as `config.resume` needs it.
            RunBusyError: another live process holds it.
            ConfigMismatchError: the saved configuration differs elsewhere; the keys are listed.
            StorageError: the folder cannot be made or written.
        """
        plain = files.plain_value(resolved)
        allowed = tuple(may_change)
        first = not jax.distributed.is_initialized() or jax.process_index() == 0
        lock, resumed = _claim(config, plain, allowed) if first else (-1, False)
        if jax.distributed.is_initialized():
            resumed = bool(multihost_utils.broadcast_one_to_all(np.array(resumed)))
        kind = cls if first else _Follower
        fingerprint = config_fingerprint(plain, may_change=allowed)
        return cast(Self, kind(config, resumed=resumed, lock=lock, fingerprint=fingerprint))

    def _best_score(self) -> float | None:
        """The latest value of the metric `run.keep_best`; None where the last step lacks it."""
        return self.metrics.last.get(self.config.keep_best) if self._open else None

    def start(self, step: int) -> None:
        """Puts the records back to `step` steps done and opens them for appending.

        Everything of step `step` and later is cut off, so that the files are what an uninterrupted
        run would have at this point; evaluations of the state at `step` itself are kept.
        """
        with storage_errors(self.path, doing="cut the records back"):
            self._cut_back(step)
        self.metrics = MetricsWriter(self.path, start=step, tensorboard=self.config.tensorboard)
        self._transcripts = files.JsonLines(self.path / TRANSCRIPTS)
        self._open = [self.metrics, self._transcripts]

    def _cut_back(self, step: int) -> None:
        for name in (METRICS, TRANSCRIPTS):
            dropped = files.keep_lines(self.path / name, lambda record: record["step"] < step)
            if dropped:
                logging.info("%s: %d lines of step %d and later dropped", self.path / name, dropped, step)
        files.keep_lines(self.path / EVALS, lambda record: record["step"] <= step)
        written = [record["step"] for record in files.read_lines(self.path / METRICS)]
        if step > 0 and (not written or written[-1] != step - 1):
            logging.warning(
                "%s ends at step %s, expected %d: lines are missing",
                self.path / METRICS,
                written[-1] if written else "none",
                step - 1,
            )

    def write_transcripts(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Appends sampled completions of `step`.

        Args:
            step: the step they were sampled in.
            samples: objects with `prompt`, `completion`, `reward`, `reward_parts` and
                `logprob_gap_max`, as docs/RUNS.md lists them.
        """
        for sample in samples:
            self._transcripts.append({"step": step, **sample})

    def write_eval(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        """Records an evaluation of the state after `step` steps; one of that step and name is replaced.

        Args:
            step: steps done.
            name: what was evaluated, e.g. "before" or "after".
            values: `metric` (e.g. "pass@1"), `value`, `low`, `high` (a 95 % interval), `count`.
        """
        path = self.path / EVALS
        record = files.strict_record({"step": step, "name": name, **values})
        others = [r for r in files.read_lines(path) if (r["step"], r.get("name")) != (step, name)]
        files.write_atomically(path, files.dump_lines([*others, record]))

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Saves manifest.json; what an earlier start of the same run wrote moves to `earlier_starts`."""
        path = self.path / MANIFEST
        plain, earlier = files.plain_value(manifest), []
        if self.resumed and path.exists():
            saved = files.read_json(path)
            for key, old, new in manifest_changes(saved, plain):
                logging.warning(
                    "%s: %s was %s and is now %s: bit-equal metrics are not promised", path, key, old, new
                )
            earlier = [*saved.pop("earlier_starts", []), saved]
        files.write_atomically(path, files.dump_json({**plain, "earlier_starts": earlier}))

    def close(self) -> None:
        """Closes every file and gives the folder free. A second call does nothing."""
        for item in self._open:
            item.close()
        self._open = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Follower(RunDirectory):
    """The run folder in a process other than 0: takes part in checkpoints and writes nothing else."""

    def start(self, step: int) -> None:
        self.metrics = UnwrittenMetrics(start=step)
        self._open = [self.metrics]

    def write_transcripts(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        pass

    def write_eval(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        pass

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        pass


def begun(path: Path) -> bool:
    """Whether a folder holds a run with anything to lose: a line of its records, or a checkpoint."""
    lines = any((path / name).exists() and (path / name).stat().st_size for name in (METRICS, EVALS))
    saved = (path / CHECKPOINTS).is_dir() and any((path / CHECKPOINTS).iterdir())
    return (path / CONFIG).exists() and (lines or saved)


def _claim(config: RunConfig, plain: Mapping[str, Any], may_change: tuple[str, ...]) -> tuple[int, bool]:
    """Locks the folder and saves the configuration; (the lock, whether a run is resumed)."""
    path = config.path
    with storage_errors(path, doing="read the run folder"):
        found = begun(path)
    if config.resume == "must" and not found:
        raise RunNotFoundError(f'{path} holds no run to resume (run.resume="must")')
    with storage_errors(path, doing="make the run folder"):
        path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    try:
        resumed = begun(path)
        if resumed and config.resume == "never":
            raise RunExistsError(
                f"{path} already holds a run: continue it with --set run.resume=auto, or name a new one with "
                f"--set run.name=..."
            )
        if resumed:
            require_same_config(files.read_json(path / CONFIG), plain, path=path, may_change=may_change)
        files.write_atomically(path / CONFIG, files.dump_json(plain))
    except RunError:
        os.close(lock)
        raise
    return lock, resumed


def require_same_config(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, path: Path, may_change: Iterable[str] = MAY_CHANGE
) -> None:
    """Refuses to resume under another configuration.

    Raises:
        ConfigMismatchError: lists each differing dotted key with both values.
    """
    found = differing(saved, new, may_change=may_change)
    if found:
        shown = "; ".join(f"{key}: saved {old!r}, now {now!r}" for key, old, now in found)
        raise ConfigMismatchError(
            f"cannot resume {path} under another configuration: {shown}; a run of its own takes another "
            f"name, e.g. --set run.name={path.name}-2"
        )


def differing(
    saved: Mapping[str, Any], new: Mapping[str, Any], *, may_change: Iterable[str] = MAY_CHANGE
) -> list[tuple[str, Any, Any]]:
    """The `config_differences` that keep a run of `saved` from being resumed under `new`."""
    allowed = tuple(may_change)
    return [item for item in config_differences(saved, new) if not _allowed(item[0], allowed)]


def config_fingerprint(config: Mapping[str, Any], *, may_change: Iterable[str] = MAY_CHANGE) -> str:
    """SHA-256 of every key that may not change; equal for two configurations that may share a run."""
    allowed = tuple(may_change)
    fixed = {key: value for key, value in flatten(config).items() if not _allowed(key, allowed)}
    return hashlib.sha256(files.dump_json(fixed)).hexdigest()


def config_differences(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, saved value, new value) of every difference, by key; an absent value is None."""
    old, now = flatten(saved), flatten(new)
    return [(key, old.get(key), now.get(key)) for key in sorted({*old, *now}) if old.get(key) != now.get(key)]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested mapping; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _allowed(key: str, patterns: Sequence[str]) -> bool:
    return any(key == p or (p.endswith(".*") and key.startswith(p[:-1])) for p in patterns)


def _lock(path: Path) -> int:
    """Takes the folder's lock, which the kernel gives free when the process ends, however it ends."""
    with storage_errors(path, doing="lock the run folder"):
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunBusyError(f"{path} is in use by another live process") from None
    except OSError as error:
        os.close(descriptor)
        raise RunError(f"{path} cannot be locked: {error.strerror}") from None
    return descriptor
