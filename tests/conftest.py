"""What every test shares: eight simulated devices, seeds from test names, and skips with reasons."""

import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import processes

# Sharding tests run on simulated devices. The number is fixed before jax first starts its CPU
# client, so that a test's result does not depend on which tests ran before it.
jax.config.update("jax_num_cpu_devices", 8)

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / "models" / "smollm2"
MAPS = Path("/proc/self/maps")

#: Files that take minutes: begun first, so that neither of two processes is left alone with one at the end.
LONGEST_FIRST = (
    "parallel/meshes_test.py",
    "loop/resume_test.py",
    "loop/processes_test.py",
    "analysis/mismatch_test.py",
    "parallel/guided_on_mesh_test.py",
    "loop/mixture_test.py",
    "analysis/checks_test.py",
    "cli/sweep_workers_test.py",
)

# Compiling is most of what the tests do. Compiled programs are kept between runs under a key of
# their HLO, compiler version and flags, so `make test-all` after `make test` compiles what is new.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a small one takes 50 ms
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, each with its reason; sorts files; `fast_cases` alone stay fast."""
    for item in items:
        fast = item.get_closest_marker("fast_cases")
        if isinstance(item, pytest.Function) and fast and item.callspec.id not in fast.args:
            item.add_marker("slow")
        for mark, reason in _missing(item):
            item.add_marker(pytest.mark.skip(reason=f"{mark}: {reason}"))
    order = {ROOT / "tests" / name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))  # stable


def _missing(item: pytest.Item) -> list[tuple[str, str]]:
    reasons = []
    if item.get_closest_marker("gpu") and not _has_gpu():
        reasons.append(("gpu", "jax sees no GPU here"))
    if item.get_closest_marker("smollm2") and not any(SMOLLM2.glob("*")):
        reasons.append(("smollm2", "models/smollm2 is absent; run `fp4rl fetch smollm2`"))
    if item.get_closest_marker("tasks") and not _has_tasks():
        reasons.append(("tasks", "reasoning_gym or math_verify is not installed; run `make venv-tasks`"))
    return reasons


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())


def _has_tasks() -> bool:
    return all(importlib.util.find_spec(name) for name in ("reasoning_gym", "math_verify"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Says at once what failed: a run that is cut off has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed:\n{report.longreprtext[-4000:]}", file=sys.__stderr__, flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows what the parity tests found: their figures are the point, not only that they pass."""
    found = [report for report in terminalreporter.stats.get("passed", []) if "tests/parity" in report.nodeid]
    texts = [report.capstdout.strip() for report in found if report.when == "call"]
    if any(texts):
        terminalreporter.section("parity")
        terminalreporter.write_line("\n\n".join(text for text in texts if text))


@pytest.fixture(scope="module", autouse=True)
def _drop_programs() -> Iterator[None]:
    """Lets go of a file's compiled programs after it: they hold memory, and mappings of it."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def _end_processes() -> Iterator[None]:
    """Ends the processes that a file's tests started and, failing, left running."""
    yield
    processes.end_all()


@pytest.fixture(autouse=True)
def _drop_many_programs() -> Iterator[None]:
    """Lets go of compiled programs where a file makes very many of them.

    A program takes hundreds of memory mappings, of which Linux gives a process 65,530; the one too many
    ends it with a segmentation fault inside the compiler.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, the same in every run: the CRC of its name."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A numpy generator seeded from the test's name."""
    return np.random.default_rng(seed)


@pytest.fixture
def key(seed: int) -> jax.Array:
    """A typed jax key seeded from the test's name."""
    return jax.random.key(seed)
