"""`fp4rl sample` and `fp4rl eval` from end to end on a tiny saved model, and what they refuse."""

import io
import json

import jax
import pytest

from fp4rl_jax import interchange, models
from fp4rl_jax.cli import main
from fp4rl_jax.cli.sample import prompt_width, read_prompts
from fp4rl_jax.text import byte_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A random one-layer model over bytes, as a Hugging Face directory."""
    config = models.ModelConfig(
        vocab_size=272, num_layers=1, d_model=32, d_ff=32, num_heads=2, max_length=256
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    params = models.init_params(config, jax.random.key(0))
    return str(interchange.save_hf(params, folder, config=config, tokenizer=byte_tokenizer()))


COMMON = ("--max_new_tokens=4", "--temperature=1.0", "--dtype=float32")


def test_sample_answers_every_prompt_of_a_file(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('one\n\n{"prompt": "two"}\n{"messages": [{"role": "user", "content": "three"}]}\n')
    out = tmp_path / "answers.jsonl"
    words = [
        "sample",
        f"--model={checkpoint}",
        f"--prompts={prompts}",
        "--batch_prompts=2",
        "--num_samples=2",
    ]
    assert main([*words, f"--out={out}", *COMMON]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"][-1]["content"] for row in rows] == ["one", "two", "three"]
    assert all(len(row["answers"]) == 2 for row in rows)
    assert all(1 <= answer["num_tokens"] <= 4 for row in rows for answer in row["answers"])
    assert all(answer["logprob"] < 0 for row in rows for answer in row["answers"])
    assert "weights unquantized" in capsys.readouterr().err
    again = tmp_path / "again.jsonl"
    assert main([*words, f"--out={again}", *COMMON]) == 0
    assert again.read_text() == out.read_text()


def test_chat_reads_lines_until_an_empty_one(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/new\nagain\n\nnot read\n"))
    assert main(["sample", f"--model={checkpoint}", *COMMON]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def test_eval_prints_estimates_and_writes_answers(checkpoint, tmp_path, capsys):
    out = tmp_path / "eval.jsonl"
    words = [
        "eval",
        f"--model={checkpoint}",
        "--limit=5",
        "--batch_prompts=4",
        "--num_samples=2",
        "--pass_at=2",
    ]
    assert main([*words, "--prompt_width=128", f"--out={out}", *COMMON]) == 0
    printed = capsys.readouterr().out
    assert "5 held-out items, 2 answers each" in printed and "mean@2: " in printed and "pass@2: " in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5 and all(len(row["answers"]) == len(row["correct"]) == 2 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "--model=nowhere"], "nowhere"),
        (["sample", "--recipe=qat_w4a"], "did you mean 'qat_w4a4'"),
        (["eval", "--task=arithmetik"], "did you mean 'arithmetic'"),
        (["eval", "--set=digit=2"], "did you mean 'task.digits'"),
    ],
)
def test_mistakes_are_one_clear_line(words, message, capsys):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_top_p_out_of_range_is_named(checkpoint, capsys):
    assert main(["sample", f"--model={checkpoint}", "--top_p=0"]) == 1
    assert "top_p must be in (0, 1], got 0" in capsys.readouterr().err


def test_prompt_files(tmp_path):
    path = tmp_path / "p"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r":1: expected .prompt. or .messages., got keys \['text'\]"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)


def test_widths_are_few():
    assert [prompt_width(n) for n in (1, 64, 65, 128, 200)] == [64, 64, 128, 128, 256]
