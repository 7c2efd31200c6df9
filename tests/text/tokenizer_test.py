"""Token ids, decoded text and chats equal transformers' (tests/fixtures/text.json)."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp4rl_jax import text

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "text.json").read_text(encoding="utf-8"))
STRINGS: list[str] = EXPECTED["strings"]


def _smollm2() -> text.Tokenizer:
    from fp4rl_jax.interchange.gguf_file import GGUFFile

    return text.from_gguf_metadata(GGUFFile(next(SMOLLM2.glob("*.gguf"))).metadata)


def _tiny() -> text.Tokenizer:
    return text.load_tokenizer(FIXTURES / "tiny_qwen3")


CASES = [
    pytest.param("tiny", _tiny, id="tiny"),
    pytest.param("smollm2", _smollm2, id="smollm2", marks=pytest.mark.smollm2),
]


@pytest.mark.parametrize(("name", "make"), CASES)
def test_ids_of_a_mixed_string_set_equal_transformers(name, make) -> None:
    tokenizer = make()
    ids = [tokenizer.encode(string) for string in STRINGS]
    assert ids == EXPECTED[name]["ids"]
    assert sum(map(len, ids)) > 200


@pytest.mark.parametrize(("name", "make"), CASES)
def test_decoded_text_equals_transformers(name, make) -> None:
    tokenizer = make()
    assert [tokenizer.decode(ids) for ids in EXPECTED[name]["ids"]] == EXPECTED[name]["decoded"]


@pytest.mark.parametrize("ending", ["assistant", "none"])
@pytest.mark.parametrize(("name", "make"), CASES)
def test_chats_equal_transformers_in_text_and_ids(name, make, ending) -> None:
    tokenizer = make()
    chats = EXPECTED["chats"]
    assert [tokenizer.render_chat(c, ending=ending) for c in chats] == EXPECTED[name][f"chat_{ending}"]
    assert [tokenizer.encode_chat(c, ending=ending) for c in chats] == EXPECTED[name][f"chat_{ending}_ids"]


@pytest.mark.smollm2
def test_smollm2_has_the_published_special_ids() -> None:
    tokenizer = _smollm2()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (1, 2, (2,))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_tokens["bos_token"] == "<|im_start|>"


@pytest.mark.parametrize("rule", ["gpt-2", "qwen2", "llama-bpe"])
def test_gguf_splitting_rules_equal_transformers(rule: str) -> None:
    case = EXPECTED["splitters"]
    tokenizer = text.from_gguf_metadata(_metadata(case["vocab"], case["merges"], rule))
    assert [tokenizer.encode(string) for string in case["strings"]] == case[rule]


def _metadata(tokens: list[str], merges: list[str], rule: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_gguf_add_bos_token_prepends_it() -> None:
    case = EXPECTED["splitters"]
    plain = _metadata(case["vocab"], case["merges"], "smollm")
    with_bos = text.from_gguf_metadata(plain | {"tokenizer.ggml.add_bos_token": True})
    assert with_bos.encode("a1") == [1, *text.from_gguf_metadata(plain).encode("a1")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "unknown tokenizer.ggml.model 'llama'"),
        ({"tokenizer.ggml.pre": "smolm"}, "unknown tokenizer.ggml.pre 'smolm': did you mean 'smollm'"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 320 tokens"),
        ({"tokenizer.ggml.eos_token_id": 400}, "eos_token_id is 400, outside the 320 tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
    ],
)
def test_gguf_metadata_that_is_not_honoured_is_named(change: dict[str, Any], message: str) -> None:
    case = EXPECTED["splitters"]
    metadata = _metadata(case["vocab"], case["merges"], "smollm") | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        text.from_gguf_metadata(metadata)


def test_byte_tokenizer_maps_bytes_to_themselves() -> None:
    tokenizer = text.byte_tokenizer()
    everything = "".join(map(chr, range(1, 0x250))) + "🙂"
    assert tokenizer.encode(everything) == list(everything.encode())
    assert tokenizer.decode(tokenizer.encode(everything)) == everything
    assert (tokenizer.vocab_size, tokenizer.stop_ids) == (259, (257,))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 256 and 257 in ids and tokenizer.decode(ids).endswith("assistant\n")


def test_an_id_that_stands_for_no_token_decodes_to_nothing() -> None:
    assert text.byte_tokenizer().decode([97, 259, 511, 98]) == "ab"
    with pytest.raises(ValueError, match="token id -1 is negative"):
        text.byte_tokenizer().decode([97, -1])


def test_vocab_size_covers_gaps(tmp_path: Path) -> None:
    state = json.loads((FIXTURES / "tiny_qwen3" / "tokenizer.json").read_text())
    del state["model"]["vocab"]["!"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert text.load_tokenizer(tmp_path).vocab_size == 320


def test_a_saved_tokenizer_loads_again_equal(tmp_path: Path) -> None:
    before = _tiny()
    text.save_tokenizer(before, tmp_path)
    after = text.load_tokenizer(tmp_path)
    assert [after.encode(s) for s in STRINGS] == [before.encode(s) for s in STRINGS]
    for field in ("bos_id", "eos_id", "pad_id", "stop_ids", "special_tokens", "chat_template"):
        assert getattr(after, field) == getattr(before, field)


def _edited(tmp_path: Path, name: str, value: Any) -> Path:
    text.save_tokenizer(_tiny(), tmp_path)
    path = tmp_path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | value) if isinstance(value, dict) else value)
    return tmp_path


def test_stop_ids_join_generation_config_and_eos(tmp_path: Path) -> None:
    folder = _edited(tmp_path, "generation_config.json", {"eos_token_id": [0, 2]})
    assert text.load_tokenizer(folder).stop_ids == (0, 2)


def test_a_list_of_chat_templates_uses_the_default_one(tmp_path: Path) -> None:
    (entries := [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]).reverse()
    folder = _edited(tmp_path, "tokenizer_config.json", {"chat_template": entries})
    (folder / "chat_template.jinja").unlink()
    assert text.load_tokenizer(folder).chat_template == "D"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "<eos>"}, "eos_token is '<eos>', which is not in"),
        ("tokenizer_config.json", {"add_bos_token": True}, "add_bos_token = True, but the pipeline"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer.json", '{"version": ', "tokenizer.json is not valid JSON"),
    ],
)
def test_files_that_contradict_each_other_are_named(tmp_path: Path, name: str, value, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text.load_tokenizer(_edited(tmp_path, name, value))


def test_a_directory_without_tokenizer_json_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json \(tokenizer.model alone"):
        text.load_tokenizer(tmp_path)
