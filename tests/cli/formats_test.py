"""`fp4rl formats`: the table, the picture, a tensor from a file, mistakes named in one line."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from fp4rl_jax import cli, formats


def test_every_format_is_listed_with_bits_error_and_a_picture(tmp_path, capsys):
    picture = tmp_path / "formats.png"
    assert cli.main(["formats", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    table = {line.split()[0]: line.split()[1:3] for line in text.splitlines() if "%" in line}
    assert set(table) == set(formats.names())
    assert (table["nvfp4"][0], table["mxfp4"][0]) == ("4.5", "4.25")
    assert 0.005 < float(table["nvfp4"][1]) < 0.012
    assert (
        "0 0.5 1 1.5 2 3 4 6  (8 magnitudes)" in text and "E4M3 a block of 16; power of two a tensor" in text
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_tensor_of_a_file_is_measured(tmp_path, capsys):
    x = np.tile(np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, -6], np.float32), (4, 8))
    np.save(tmp_path / "w.npy", x)
    save_file({"a": x[0], "b.weight": 2 * x}, tmp_path / "w.safetensors")
    for words in (["w.npy"], ["w.safetensors"], ["w.safetensors", "--tensor=a"]):
        file = str(tmp_path / words[0])
        assert cli.main(["formats", file, *words[1:], "--format=mxfp4", "--picture="]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "%" in line)
        assert line.split()[:3] == ["mxfp4", "4.25", "0.00e+00"], "values on the grid have no error"


def test_options_are_set_by_word(tmp_path, capsys):
    np.save(tmp_path / "w.npy", np.ones((2, 256), np.float32))
    file = str(tmp_path / "w.npy")
    assert cli.main(["formats", file, "--format=fp8_e4m3", "--set=block_size=128", "--picture="]) == 0
    assert "fp8_e4m3 block_size=128" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["absent.npy"], "absent.npy is not a file"),
        (["--format=nvpf4"], "unknown format 'nvpf4': did you mean 'nvfp4'"),
        (["--format=nvfp4", "--set=outr=row"], "did you mean 'outer'"),
        (["--format=nvfp4", "--set=outer"], "--set takes option=value, got 'outer'"),
        (["a.npy", "b.npy"], "takes one file, got 2"),
        (["--axis=5", "--format=mxfp4"], "unknown axis"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    assert cli.main(["formats", *words, "--picture="]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unknown_tensor_names_the_nearest(tmp_path, capsys):
    save_file({"blocks.0.w": np.ones((2, 32), np.float32)}, tmp_path / "w.safetensors")
    assert cli.main(["formats", str(tmp_path / "w.safetensors"), "--tensor=blocks.0.v"]) == 2
    assert "did you mean 'blocks.0.w'" in capsys.readouterr().err
