"""tools/find_python.sh: a Python is what runs, not what is on PATH."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "find_python.sh"
SHIM = '#!/bin/sh\necho "pyenv: python3.13: command not found" >&2\nexit 127\n'
OLD = '#!/bin/sh\nexec "$REAL" -c "raise SystemExit(1)"\n'
GOOD = '#!/bin/sh\nexec "$REAL" "$@"\n'


def _find(folder: Path, *args: str, **executables: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a PATH that holds only `executables` (name with _ for the dot: text)."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for tool in ("cat", "sh"):
        (bin_folder / tool).symlink_to(f"/bin/{tool}")
    for name, text in executables.items():
        path = bin_folder / name.replace("_", ".")
        path.write_text(text)
        path.chmod(0o755)
    env = {"PATH": str(bin_folder), "HOME": str(folder), "REAL": os.path.realpath(sys.executable)}
    return subprocess.run(["/bin/sh", str(SCRIPT), *args], env=env, capture_output=True, text=True)


def test_a_shim_that_answers_not_found_is_passed_over(tmp_path: Path) -> None:
    done = _find(tmp_path, python3_13=SHIM, python3_12=GOOD)
    assert done.returncode == 0
    assert Path(done.stdout.strip()).name.startswith("python")


def test_an_old_python_is_passed_over_for_the_one_of_the_version_manager(tmp_path: Path) -> None:
    managed = tmp_path / ".pyenv" / "versions" / "3.13.0" / "bin"
    managed.mkdir(parents=True)
    (managed / "python").write_text(GOOD)
    (managed / "python").chmod(0o755)
    done = _find(tmp_path, python3_13=SHIM, python3=OLD)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_none_found_says_what_to_install(tmp_path: Path) -> None:
    done = _find(tmp_path, python3_13=SHIM, python3_12=SHIM, python3=OLD)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "sudo apt-get install python3 python3-venv python3-dev" in done.stderr


def test_a_named_python_is_the_only_one_tried(tmp_path: Path) -> None:
    done = _find(tmp_path, "python3.12", python3_12=OLD, python3_13=GOOD)
    assert done.returncode == 1
    assert "python3.12 is not a Python >= 3.12" in done.stderr
