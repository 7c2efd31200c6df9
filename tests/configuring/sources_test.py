"""Configuration files: TOML, JSON, and what is said about one that cannot be read."""

from pathlib import Path

import pytest

from fp4rl_jax.configuring import ConfigError, Word, parse_override, read_file


def test_toml_and_json_files_give_the_same_mapping(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[optim]\nlr = 1e-3\nbetas = [0.9, 0.95]\n[run]\nname = "x"\n')
    (tmp_path / "a.json").write_text('{"optim": {"lr": 0.001, "betas": [0.9, 0.95]}, "run": {"name": "x"}}')
    assert read_file(str(tmp_path / "a.toml")) == read_file(str(tmp_path / "a.json"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml': No such file or directory$"):
        read_file(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize("name, kind", [("a.toml", "TOML"), ("a.json", "JSON")])
def test_a_malformed_file_is_named_with_the_place(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text("[run\n")
    with pytest.raises(ConfigError, match=rf"{name}: not valid {kind}: .*line"):
        read_file(str(tmp_path / name))


def test_a_word_keeps_its_text_and_its_value() -> None:
    assert parse_override("a.b=5e-7") == {"a": {"b": Word("5e-7", 5e-7)}}
    assert parse_override("a = bare ") == {"a": Word("bare", "bare")}
