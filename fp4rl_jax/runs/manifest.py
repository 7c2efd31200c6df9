"""The manifest of a run: what it ran on, with what, and how each matmul was executed."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "chex",
    "numpy",
    "ml_dtypes",
    "grain",
    "tokenizers",
)
_VARIABLES = (
    "XLA_FLAGS",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)
_JAX_SETTINGS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_platforms")

# Parts of a manifest that a bit-equal resume must share.
_NUMERIC = ("versions", "git_commit", "backend", "devices", "processes", "keys", "determinism", "numerics")
_NUMERIC += ("implementations",)


def build_manifest(
    *, seed: int, implementations: Mapping[str, Any], numerics: Mapping[str, Any], start_step: int = 0
) -> dict[str, Any]:
    """Describes this process, its devices and its numeric choices as plain JSON values.

    Args:
        seed: root of every key of the run.
        implementations: for "trainer" and "rollout", by site: the implementation chosen, the
            reason, and the executed precision (native, emulated-exact or reference).
        numerics: dtypes, `ops.order` and whatever else decides the numeric path.
        start_step: steps done when this process took over; 0 for a new run.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "start_step": start_step,
        "command": sys.argv,
        "versions": versions(),
        "git_commit": git_commit(Path(__file__).resolve().parents[2]),
        "host": {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()},
        "backend": jax.default_backend(),
        "devices": [_device(device) for device in jax.devices()],
        "processes": jax.process_count(),
        "keys": {"seed": seed, "implementation": str(jax.config.jax_default_prng_impl)},
        "determinism": {name: os.environ.get(name) for name in _VARIABLES}
        | {name: getattr(jax.config, name) for name in _JAX_SETTINGS},
        "numerics": dict(numerics),
        "implementations": dict(implementations),
    }


def manifest_changes(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(part, old, new) of what decides the numbers and differs between two starts of one run."""
    return [(part, saved.get(part), new.get(part)) for part in _NUMERIC if saved.get(part) != new.get(part)]


def versions() -> dict[str, str | None]:
    """Versions of Python, of this project and of the packages that decide the numbers; None if absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("fp4rl_jax", *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: Path) -> str | None:
    """The commit of a source checkout, with "+changes" if it has any; None outside one."""
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git, or not a checkout that git can read
        return None
    return head + ("+changes" if changes else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _device(device: Any) -> dict[str, Any]:
    capability = getattr(device, "compute_capability", None)
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "compute_capability": capability,
    }
