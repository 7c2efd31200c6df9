"""tools/make_venv.sh: installs once, again when what was asked for changes, and resumes when cut short."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A Python that records what it was asked; `-m pip install` fails while the file `broken` exists.
STUB = """#!/bin/sh
case "$*" in
-c*) echo "{stub}" ;;
"-m venv"*) echo venv >> "{log}"; mkdir -p .venv/bin; rm -f .venv/installed-*; cp "{stub}" .venv/bin/python ;;
*install*) echo "${{*#*install }}" >> "{log}"; test ! -e "{broken}" ;;
esac
"""

BASE = ["-qq --no-deps -r requirements.lock", "-qq --no-deps --no-build-isolation --editable ."]


class Checkout:
    """A copy of what the script needs, with a stub for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.log, self.broken, self.stub = folder / "log", folder / "broken", folder / "python3"
        self.stub.write_text(STUB.format(stub=self.stub, log=self.log, broken=self.broken))
        self.stub.chmod(0o755)
        (self.folder / "tools").mkdir(parents=True)
        for name in ("make_venv.sh", "find_python.sh"):
            shutil.copy(ROOT / "tools" / name, self.folder / "tools" / name)
        for name in ("requirements.lock", "tasks.lock", "pyproject.toml"):
            (self.folder / name).write_text(name)

    def run(self, *args: str) -> list[str]:
        """Runs the script and returns what it asked of Python, in order."""
        self.log.write_text("")
        command = ["/bin/sh", str(self.folder / "tools" / "make_venv.sh"), *args]
        env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHON": str(self.stub)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (done.returncode == 0) == (not self.broken.exists()), done.stderr
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_call_installs_and_the_second_does_nothing(checkout: Checkout) -> None:
    assert checkout.run() == ["venv", *BASE]
    assert checkout.run() == []
    (checkout.folder / "requirements.lock").touch()
    assert checkout.run() == []


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_changed_requirements_are_installed_into_the_same_environment(checkout: Checkout, name: str) -> None:
    checkout.run()
    (checkout.folder / name).write_text("changed")
    assert checkout.run() == BASE
    assert checkout.run() == []


def test_an_interrupted_installation_is_taken_up_again(checkout: Checkout) -> None:
    checkout.broken.touch()
    assert checkout.run() == ["venv", BASE[0]]
    checkout.broken.unlink()
    assert checkout.run() == BASE


def test_a_moved_folder_gets_a_new_environment(checkout: Checkout) -> None:
    checkout.run()
    checkout.folder = checkout.folder.rename(checkout.folder.parent / "moved")
    assert checkout.run() == ["venv", *BASE]


def test_the_tasks_extra_is_installed_once_on_top(checkout: Checkout) -> None:
    checkout.run()
    assert checkout.run("tasks") == ["-qq --no-deps -r tasks.lock"]
    assert checkout.run("tasks") == []
    (checkout.folder / "requirements.lock").write_text("changed")
    assert checkout.run("tasks") == [*BASE, "-qq --no-deps -r tasks.lock"]
