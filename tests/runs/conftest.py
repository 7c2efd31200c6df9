"""A small disk of its own for the tests of refusing disks."""

import subprocess

import pytest


@pytest.fixture
def tmpfs(tmp_path):
    """A file system of 1 MiB of its own; needs the right to mount."""
    root = tmp_path / "disk"
    root.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.decode().strip()}")
    yield root
    subprocess.run(["umount", str(root)], check=True)
