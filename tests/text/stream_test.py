"""Streaming text: the pieces joined are the whole, and no half character is ever shown."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fp4rl_jax import text

STRINGS = json.loads((Path(__file__).parent.parent / "fixtures" / "text.json").read_text("utf-8"))["strings"]


def test_pieces_joined_equal_the_decoded_whole() -> None:
    tokenizer = text.load_tokenizer(Path(__file__).parent.parent / "fixtures" / "tiny_llama")
    for string in STRINGS:
        ids = tokenizer.encode(string)
        stream = text.StreamDecoder(tokenizer=tokenizer)
        pieces = [stream.push(i) for i in ids]
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


def test_a_character_appears_when_its_last_byte_arrives() -> None:
    stream = text.StreamDecoder(tokenizer=text.byte_tokenizer())
    assert [stream.push(b) for b in "é🙂!".encode()] == ["", "é", "", "", "", "🙂", "!"]
    assert stream.finish() == ""


def test_bytes_that_never_complete_come_out_at_the_end() -> None:
    stream = text.StreamDecoder(tokenizer=text.byte_tokenizer())
    assert [stream.push(b) for b in (97, 0xE2)] == ["a", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(98) == "b"


def test_special_tokens_are_skipped_or_kept() -> None:
    for special, last in (("skip", ""), ("keep", "<|im_end|>")):
        stream = text.StreamDecoder(tokenizer=text.byte_tokenizer(), special=special)
        assert [stream.push(97), stream.push(257)] == ["a", last]


@given(st.lists(st.integers(0, 258), max_size=24))
def test_any_ids_stream_to_the_text_of_the_whole(ids: list[int]) -> None:
    tokenizer = text.byte_tokenizer()
    stream = text.StreamDecoder(tokenizer=tokenizer)
    assert "".join(stream.push(i) for i in ids) + stream.finish() == tokenizer.decode(ids)
