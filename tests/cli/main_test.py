"""`fp4rl`: subcommands found by folder, the list of them, and answers to mistakes."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4rl_jax import cli, plugins
from fp4rl_jax.runs import exit_codes


def test_help_lists_every_subcommand_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in plugins.names(cli):
        assert [line for line in lines if line.split()[:1] == [name] and len(line.split()) > 2], name


def test_every_subcommand_has_a_one_line_summary_and_main() -> None:
    for name in plugins.names(cli):
        tree = ast.parse((Path(cli.__file__).parent / f"{name}.py").read_text())
        assert "main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], name
        assert "\n" not in cli.summary(name)


def test_an_unknown_subcommand_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explian"]) == 2
    assert "unknown subcommand 'explian': did you mean 'explain'?" in capsys.readouterr().err


def test_no_subcommand_prints_the_list_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: fp4rl SUBCOMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("name", plugins.names(cli))
def test_every_subcommand_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"fp4rl {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", plugins.names(cli))
def test_every_subcommand_refuses_an_unknown_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--no_such_flag=1"]) == 2
    assert "no_such_flag" in capsys.readouterr().err


def test_an_unknown_flag_says_how_a_key_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--resume"]) == 2
    assert (
        capsys.readouterr().err.strip().endswith("; a configuration's key is given as --set key.path=value")
    )


@pytest.mark.parametrize(
    ("name", "words"), [("report", "RUN [RUN ...] "), ("formats", "[FILE] "), ("train", "")]
)
def test_help_names_what_a_subcommand_takes(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"\nusage: fp4rl {name} {words}[flags]\n" in capsys.readouterr().out


def test_output_that_nobody_reads_any_more_is_no_traceback() -> None:
    command = [sys.executable, "-m", "fp4rl_jax", "explain", "--config", "configs/ci/grpo.toml", "--dry_run"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2])
    os.close(write)
    assert done.stderr == b"" and done.returncode == exit_codes.OUTPUT_CLOSED
