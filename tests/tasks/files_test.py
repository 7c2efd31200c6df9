"""Tasks read from JSON Lines files: gsm8k and the reader under all of them."""

import json

import pytest

from fp4rl_jax.tasks import Item, gsm8k
from fp4rl_jax.tasks._jsonl import split_rows


def _write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def _gsm8k(tmp_path, train=None, **options):
    row = {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}
    held_out = {"question": "Negative?", "answer": "#### -1,250"}
    return gsm8k.Config(
        train_path=_write(tmp_path / "a.jsonl", [row] if train is None else train),
        eval_path=_write(tmp_path / "b.jsonl", [held_out]),
        **options,
    )


def test_gsm8k_gold_and_rewards(tmp_path):
    task = gsm8k.build(_gsm8k(tmp_path, format_weight=0.1))
    item = task.eval[0]
    assert item.answer == "#### -1250" and item.prompt.startswith("Negative?\n\n")
    cases = [("Thus #### -1250", 1.0), ("it is -1,250.", 0.9), ("#### 1250", 0.1), ("#### -1250 apples", 0.9)]
    assert [task.reward(item, text).value for text, _ in cases] == pytest.approx([v for _, v in cases])


def test_gsm8k_without_an_instruction(tmp_path):
    assert gsm8k.build(_gsm8k(tmp_path, instruction="")).train[0].prompt == "Two and two?"


@pytest.mark.parametrize(
    "row, message",
    [
        ("{not json", "a.jsonl:2: Expecting"),
        ("[1]", "a.jsonl:2: expected a JSON object, got list"),
        ({"question": "Q"}, r"a.jsonl:2: no 'answer' among its fields \['question'\]"),
        ({"question": "", "answer": "#### 1"}, "a.jsonl:2: 'question' is ''"),
        ({"question": "Q", "answer": "7"}, "a.jsonl:2: 'answer' ends in '7'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, message):
    good = {"question": "Two and two?", "answer": "#### 4"}
    with pytest.raises(ValueError, match=message):
        gsm8k.build(_gsm8k(tmp_path, train=[good, row]))


def test_missing_paths(tmp_path):
    with pytest.raises(ValueError, match="train_path is not set"):
        gsm8k.build(gsm8k.Config())
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        gsm8k.build(gsm8k.Config(train_path="nowhere.jsonl", eval_path=str(tmp_path / "nowhere.jsonl")))


def _to_item(row):
    return Item(key=row["k"], messages=({"role": "user", "content": row["k"]},), row=row)


def test_training_rows_that_are_also_held_out_are_dropped(tmp_path):
    train = _write(tmp_path / "t.jsonl", [{"k": k} for k in "abcb"])
    held_out = _write(tmp_path / "e.jsonl", [{"k": k} for k in "bd"])
    sides = split_rows(train, held_out, keys=("train", "eval"), to_item=_to_item, eval_share=0.5)
    assert [[side[i].key for i in range(len(side))] for side in sides] == [["a", "c"], ["b", "d"]]


def test_without_a_held_out_file_whole_keys_are_held_out(tmp_path):
    path = _write(tmp_path / "t.jsonl", [{"k": str(n % 300), "n": n} for n in range(900)])
    train, held_out = split_rows(path, "", keys=("train", "eval"), to_item=_to_item, eval_share=0.2)
    keys = [{side[i].key for i in range(len(side))} for side in (train, held_out)]
    assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 300
    assert len(train) + len(held_out) == 900 and 30 <= len(keys[1]) <= 90


def test_blank_lines_and_unicode_offsets(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"k": "\u00e9\u4e2d"}\n\n{"k": "b"}\n   \n{"k": "c"}', encoding="utf-8")
    held_out = _write(tmp_path / "e.jsonl", [{"k": "z"}])
    train, _ = split_rows(str(path), held_out, keys=("train", "eval"), to_item=_to_item, eval_share=0.0)
    assert [train[i].key for i in range(len(train))] == ["\u00e9\u4e2d", "b", "c"]


@pytest.mark.parametrize("train, held_out, side", [("ab", "ab", "train"), ("ab", "", "eval")])
def test_an_empty_side_is_refused(tmp_path, train, held_out, side):
    paths = [
        _write(tmp_path / f"{n}.jsonl", [{"k": k} for k in ks]) for n, ks in (("t", train), ("e", held_out))
    ]
    with pytest.raises(ValueError, match=f"no row is left for {side}"):
        split_rows(*paths, keys=("train", "eval"), to_item=_to_item, eval_share=0.0)


@pytest.mark.parametrize(
    ("train", "held_out", "key"), [("no.jsonl", "", "train"), ("t.jsonl", "no.jsonl", "eval")]
)
def test_a_path_without_a_file_is_refused_by_its_key(tmp_path, monkeypatch, train, held_out, key):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path / "t.jsonl", [{"k": "a"}, {"k": "b"}])
    with pytest.raises(FileNotFoundError) as error:
        split_rows(train, held_out, keys=("train", "eval"), to_item=_to_item, eval_share=0.0)
    assert (
        str(error.value)
        == f"task.{key} = 'no.jsonl': expected a file, there is none at {tmp_path / 'no.jsonl'}"
    )
