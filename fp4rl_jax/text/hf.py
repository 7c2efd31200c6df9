"""Tokenizers in Hugging Face directories: read and written.

Files: `tokenizer.json` (the pipeline, the authority), `tokenizer_config.json` (names of special
tokens, chat template), `chat_template.jinja` (wins over the one in the config, as in transformers),
`generation_config.json` and `config.json` (ids that end a completion).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from fp4rl_jax.text.tokenizer import Tokenizer

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face directory.

    Raises:
        FileNotFoundError: there is no tokenizer.json; the message says what is there instead.
        ValueError: a file is not valid JSON, a named special token is not in the vocabulary, or
            the pipeline and `add_bos_token` disagree.
    """
    folder = Path(directory)
    path = folder / "tokenizer.json"
    if not path.is_file():
        kept = [n for n in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / n).is_file()]
        found = f" ({', '.join(kept)} alone cannot be read)" if kept else ""
        raise FileNotFoundError(f"{folder} has no tokenizer.json{found}")
    backend = _pipeline(path)
    settings = _json(folder / "tokenizer_config.json")
    special = _special_tokens(settings, folder)
    ids = {name: _id_of(backend, name, token) for name, token in special.items()}
    eos = ids.get("eos_token")
    tokenizer = Tokenizer(
        backend=backend,
        bos_id=ids.get("bos_token"),
        eos_id=eos,
        pad_id=ids.get("pad_token", eos if eos is not None else 0),
        stop_ids=_stop_ids(folder, eos),
        special_tokens=special,
        chat_template=_chat_template(folder, settings),
    )
    _check_bos(tokenizer, settings)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Writes the files that `load_tokenizer` and transformers read, into an existing directory."""
    folder = Path(directory)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write(folder / "tokenizer_config.json", settings | dict(tokenizer.special_tokens))
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    generation = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.stop_ids) or None,
        "pad_token_id": tokenizer.pad_id,
    }
    _write(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def _pipeline(path: Path) -> tokenizers.Tokenizer:
    text = path.read_text(encoding="utf-8")
    _parse(text, path)  # the library reports damage as a bare Exception: find it first
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _json(path: Path) -> dict[str, Any]:
    return _parse(path.read_text(encoding="utf-8"), path) if path.is_file() else {}


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _special_tokens(settings: Mapping[str, Any], folder: Path) -> dict[str, str]:
    merged = _json(folder / "special_tokens_map.json") | dict(settings)
    named = {name: merged[name] for name in _NAMES if merged.get(name) is not None}
    return {name: t["content"] if isinstance(t, dict) else t for name, t in named.items()}


def _id_of(backend: tokenizers.Tokenizer, name: str, token: str) -> int:
    index = backend.token_to_id(token)
    if index is None:
        raise ValueError(f"{name} is {token!r}, which is not in the vocabulary of tokenizer.json")
    return index


def _stop_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    found = {eos}
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value])
    return tuple(sorted(index for index in found if index is not None))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):
        by_name = {entry["name"]: entry["template"] for entry in given}
        if "default" not in by_name:
            raise ValueError(
                f"{folder}/tokenizer_config.json: chat_template has the entries {sorted(by_name)}, "
                "expected one named 'default'"
            )
        return by_name["default"]
    return given


def _check_bos(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """`add_bos_token` must say what the pipeline does, or ids differ from transformers' silently."""
    said = settings.get("add_bos_token")
    if said is None or tokenizer.bos_id is None:
        return
    does = tokenizer.encode("a")[:1] == [tokenizer.bos_id]
    if does != said:
        raise ValueError(
            f"tokenizer_config.json says add_bos_token = {said}, but the pipeline of tokenizer.json "
            f"{'adds' if does else 'does not add'} {tokenizer.special_tokens['bos_token']!r}"
        )
