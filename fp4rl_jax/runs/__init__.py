"""A run on disk: folder, metrics, manifest, transcripts, checkpoints, progress and report.

What each file of a run's folder holds is written in docs/RUNS.md.
"""

from fp4rl_jax.runs.checkpoints import Checkpointer, Restored
from fp4rl_jax.runs.config import RunConfig
from fp4rl_jax.runs.directory import MAY_CHANGE, RunDirectory
from fp4rl_jax.runs.errors import (
    CheckpointError,
    ConfigMismatchError,
    MissingExtraError,
    NoCheckpointError,
    RecordError,
    RunBusyError,
    RunError,
    RunExistsError,
    RunNotFoundError,
    StorageError,
    WrongCheckpointError,
)
from fp4rl_jax.runs.heap import give_back
from fp4rl_jax.runs.manifest import build_manifest
from fp4rl_jax.runs.metrics import MetricsWriter
from fp4rl_jax.runs.progress import make_progress

__all__ = [
    "MAY_CHANGE",
    "CheckpointError",
    "Checkpointer",
    "ConfigMismatchError",
    "MetricsWriter",
    "MissingExtraError",
    "NoCheckpointError",
    "RecordError",
    "Restored",
    "RunBusyError",
    "RunConfig",
    "RunDirectory",
    "RunError",
    "RunExistsError",
    "RunNotFoundError",
    "StorageError",
    "WrongCheckpointError",
    "build_manifest",
    "give_back",
    "make_progress",
]
