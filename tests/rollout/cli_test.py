"""`fp4rl sample` and `fp4rl eval` from end to end on a tiny saved model, and what they refuse."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from fp4rl_jax import config, interchange, models
from fp4rl_jax.cli import _job, _policy, main
from fp4rl_jax.cli.sample import prompt_width, read_prompts
from fp4rl_jax.runs import Checkpointer
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
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_top_p_out_of_range_is_named(checkpoint, capsys):
    assert main(["sample", f"--model={checkpoint}", "--top_p=0"]) == 2
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


RUN = (
    "model.shape.vocab_size=272", "model.shape.num_layers=1", "model.shape.d_model=32", "model.shape.d_ff=32",
    "model.shape.num_heads=2", "model.shape.max_length=256", "recipe.name=qat_w4a4", "rollout.dtype=float32",
    "trainer.dtype=float32", "rollout.prompt_width=128", "rollout.max_new_tokens=3", "task.terms=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, _job.Builder]:
    """A run's folder with the checkpoints of steps 1 and 2, as training writes them, and its parts."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    made = _job.builder(config.load([], RUN))
    state = made.state()
    saver = Checkpointer(folder / "checkpoints", fingerprint="of this run")
    for step in (1, 2):
        saver.save(step, dataclasses.replace(state, params_version=jnp.int32(step)), {"data": {}})
    (folder / "config.json").write_text(config.dump(made.config))
    return folder, made


def policy_of(folder: Path) -> _policy.Policy:
    values = flags.FlagValues()
    _policy.define_flags(values)
    values(["fp4rl", f"--run={folder}"])
    return _policy.load(values, _policy.run_config(values, name="sample"))


def test_a_runs_policy_is_what_the_run_publishes(run):
    folder, made = run
    policy, expected = policy_of(folder), made.publish(made.state())
    assert policy.side == made.sides.rollout and policy.recipe == "qat_w4a4"
    assert int(policy.published.version) == 2 and policy.origin == f"{folder} after 2 steps"
    ours, theirs = (jax.tree.leaves(p.params) for p in (policy.published, expected))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(run, tmp_path):
    shutil.copytree(run[0], tmp_path / "hurt")
    (tmp_path / "hurt/checkpoints/00000002/host.json").write_text("{}")
    policy = policy_of(tmp_path / "hurt")
    assert int(policy.published.version) == 1 and policy.origin.endswith("hurt after 1 steps")


@pytest.mark.slow
def test_eval_and_sample_take_task_widths_and_lengths_from_the_run(run, tmp_path, capsys):
    out = tmp_path / "eval.jsonl"
    assert main(["eval", f"--run={run[0]}", "--limit=3", "--batch_prompts=4", f"--out={out}"]) == 0
    printed = capsys.readouterr()
    assert "tiny after 2 steps: recipe qat_w4a4 (rollout side), 4.5" in printed.err
    assert "3 held-out items, 1 answers each" in printed.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 and all(row["prompt"].count("+") + row["prompt"].count("-") >= 2 for row in rows)
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("one\n")
    words = ["sample", f"--run={run[0]}", f"--prompts={prompts}", f"--out={answers}", "--batch_prompts=4"]
    assert main(words) == 0
    (answer,) = json.loads(answers.read_text())["answers"]
    assert 1 <= answer["num_tokens"] <= 3


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_what_contradicts_a_run_is_refused(command, run, tmp_path, capsys):
    assert main([command, f"--run={run[0]}", "--recipe=bf16", "--dtype=float32"]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"fp4rl {command}: --run brings its own model, recipe and dtype: drop --recipe, --dtype or --run\n"
    )
    assert main([command, f"--run={tmp_path}"]) == 3
    assert f"--run {tmp_path}: no run there (it has no config.json)" in capsys.readouterr().err
    shutil.copy(run[0] / "config.json", tmp_path)
    assert main([command, f"--run={tmp_path}"]) == 3
    assert f"--run {tmp_path}: the run has saved no checkpoint yet" in capsys.readouterr().err
