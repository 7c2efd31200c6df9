"""Supervised examples: exactly the ids that a sampler would have to draw, and what is refused by name."""

import json

import numpy as np
import pytest

from fp4rl_jax.data import chat_items, encode_examples, pack_examples, require_answers
from fp4rl_jax.tasks import Item
from fp4rl_jax.text import byte_tokenizer

TOKENIZER = byte_tokenizer()


def item(question="1 + 2?", answer="3", key="a"):
    return Item(key=key, messages=({"role": "user", "content": question},), answer=answer)


def test_the_loss_falls_on_the_answer_and_its_stop_token_alone():
    items = [item(), item("Say ab", "ab", "b")]
    found = encode_examples(TOKENIZER, items, prompt_width=50, completion_width=4)
    assert found.tokens.shape == (2, 54) and found.tokens.dtype == np.int32
    for row, one in enumerate(items):
        prompt = TOKENIZER.encode_chat(one.messages)
        answer = [*one.answer.encode(), 257]
        assert found.tokens[row, found.loss_mask[row]].tolist() == answer
        assert found.tokens[row, found.token_mask[row]].tolist() == prompt + answer
        assert found.loss_mask[row].nonzero()[0].tolist() == [*range(50, 50 + len(answer))]
        assert (
            found.token_mask[row, 50 - len(prompt) : 50].all()
            and not found.token_mask[row, : 50 - len(prompt)].any()
        )


def test_an_answer_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="answer of 'b' has 5 tokens, its stop token included, but .* is 4"):
        encode_examples(
            TOKENIZER, [item(), item(answer="1234", key="b")], prompt_width=50, completion_width=4
        )
    with pytest.raises(ValueError, match="prompt 'a' has 25 tokens, but the prompt width is 8"):
        encode_examples(TOKENIZER, [item()], prompt_width=8, completion_width=4)
    with pytest.raises(ValueError, match="problem 'a' has no answer"):
        require_answers([item(answer="")])


def test_a_chat_file_is_read_row_by_row(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [{"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yes?"), ("user", "go"))]
    last = {"role": "assistant", "content": "gone"}
    path.write_text(json.dumps({"messages": [*turns, last]}) + "\n\n")
    (found,) = chat_items(str(path))
    assert found.messages == tuple(turns) and found.answer == "gone" and found.key == f"{path}:1"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", ":1: Expecting"),
        ("[]", ":1: expected an object with 'messages'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', ":1: expected an object with 'messages'"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}', ":1: message {'role'"),
        (
            '{"messages": [{"role": "u", "content": "a"}, {"role": "user", "content": "b"}]}',
            ":1: the last mess",
        ),
        ("", ": it has no row"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "chat.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=f"{path}{message}".replace("{", "\\{").replace("[", "\\[")):
        chat_items(str(path))


def test_packing_fills_rows_in_order_and_leaves_what_fits_nowhere():
    items = [item("x" * size, "3", str(size)) for size in (4, 9, 2, 1, 5, 1)]
    lengths = [len(TOKENIZER.encode_chat(i.messages)) + 2 for i in items]  # 19 ids around a question
    assert lengths == [25, 30, 23, 22, 26, 22]
    place = [0]

    def draw():
        place[0] += 1
        return items[place[0] - 1]

    def undo():
        place[0] -= 1

    found = pack_examples(TOKENIZER, draw, undo, rows=2, width=55)
    # 25 and 30 fill row 0; 23 and 22 go to row 1, where 26 does not fit any more: it is put back
    assert place == [4] and found.count == 4
    assert found.segments is not None
    assert found.segments[0].tolist() == [1] * 25 + [2] * 30
    assert found.segments[1].tolist() == [1] * 23 + [2] * 22 + [0] * 10
    for row, inside in ((0, items[:2]), (1, items[2:4])):
        for number, one in enumerate(inside, start=1):
            ids = found.tokens[row, found.segments[row] == number].tolist()
            assert ids == [*TOKENIZER.encode_chat(one.messages), ord("3"), 257]
            assert (
                found.loss_mask[row, found.segments[row] == number].tolist()
                == [False] * (len(ids) - 2) + [True] * 2
            )
    np.testing.assert_array_equal(found.token_mask, found.segments > 0)
    place[0] = 0
    with pytest.raises(ValueError, match=r"example '4' has 25 tokens, but sft.pack_width is 24"):
        pack_examples(TOKENIZER, draw, undo, rows=2, width=24)
