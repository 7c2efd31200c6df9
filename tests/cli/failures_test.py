"""A failure that one line explains is that line and its exit code, whatever subcommand it comes from."""

import json
from pathlib import Path

import pytest

from fp4rl_jax import cli
from fp4rl_jax.configuring import ConfigError
from fp4rl_jax.interchange.fetch import FetchError
from fp4rl_jax.loop.collect import NoGroupsError
from fp4rl_jax.rollout import PublishError
from fp4rl_jax.runs import RunNotFoundError, StorageError
from fp4rl_jax.tasks import RewardError
from fp4rl_jax.text import ChatTemplateError, PromptError

CI = str(Path(__file__).parents[2] / "configs" / "ci" / "grpo.toml")


@pytest.mark.parametrize(
    "kind, code",
    [
        (ConfigError, 2),
        (RunNotFoundError, 3),
        (StorageError, 5),
        (PublishError, 6),
        (RewardError, 7),
        (PromptError, 7),
        (ChatTemplateError, 7),
        (NoGroupsError, 7),
        (FetchError, 1),
    ],
)
def test_an_expected_error_is_one_line_with_its_code(kind, code, monkeypatch, capsys):
    def fail(argv):
        raise kind("the value is 3\n  expected 4")

    monkeypatch.setattr("fp4rl_jax.cli.train.main", fail)
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == "fp4rl train: the value is 3; expected 4\n"


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch):
    def fail(argv):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("fp4rl_jax.cli.train.main", fail)
    with pytest.raises(ValueError, match="a mistake of ours"):
        cli.main(["train"])


REWARD = """
def one(item):
    return 1.0

def good(item, completion):
    return 1.0

def rows():
    return [{"prompt": word * LENGTH, "answer": word} for word in "abcdef"]

def broken():
    return [{"prompt": "a"}][1]
"""


def refused(tmp_path: Path, capsys, code: int, *words: str) -> str:
    """The one line that `fp4rl train` with ci's configuration and `words` answers."""
    overrides = (f"run.root={tmp_path}", "run.tensorboard=off", "run.progress=off", *words)
    assert cli.main(["train", "--config", CI, *(f"--set={word}" for word in overrides)]) == code
    error = capsys.readouterr().err
    assert error.startswith("fp4rl train: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("reward=F:one", "train=F:rows"), 2, "takes (item), expected a function of (item, completion)"),
        (("reward=F:good", "train=F:good"), 2, "takes (item, completion), expected a function of ()"),
        (("reward=F:good", "train=F:broken"), 2, "IndexError: list index out of range (mine.py, line 12)"),
        (("reward=F:good",), 2, "task.train is not set: in the [task] section of the TOML file write train"),
        (("train=F:rows",), 2, "task.reward is not set: in the [task] section of the TOML file write rew"),
        (("reward=F:good", "train=F:rows"), 7, "tokens, but the prompt width is 96"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_work_is_refused_before_the_run(words, code, message, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(REWARD.replace("LENGTH", "200"))
    given = (f"task.{word.replace('F:', f'{file}:')}" for word in words)
    assert message in refused(tmp_path, capsys, code, "task.name=callable", *given)


def test_a_reward_file_that_does_not_import_is_named_with_its_line(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import absent_module_xyz\n")
    words = ("task.name=callable", f"task.reward={file}:reward", f"task.train={file}:rows")
    line = refused(tmp_path, capsys, 2, *words)
    assert (
        f"importing {file}: ModuleNotFoundError: No module named 'absent_module_xyz' (mine.py, line 1)"
        in line
    )


def test_widths_beyond_the_model_are_refused_before_the_run(tmp_path, capsys):
    line = refused(tmp_path, capsys, 2, "rollout.prompt_width=255")
    assert "rollout.prompt_width = 255 and rollout.max_new_tokens = 6" in line and "max_length of 256" in line


@pytest.mark.parametrize(
    "root, code, reason",
    [
        ("{here}/file", 5, "a part of the path is a file, not a folder"),
        ("{here}/taken", 5, "a file of that name is in the way"),
        ("/proc/nothing", 5, "a folder of the path is missing and cannot be made"),
        ("{here}/" + 300 * "x", 5, "the name is too long for the file system"),
    ],
)
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_an_unusable_root_is_one_line(root, code, reason, resume, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "ci-grpo").touch()
    root = root.format(here=tmp_path)
    line = refused(tmp_path, capsys, code, f"run.root={root}", f"run.resume={resume}")
    assert f"run folder at {root}/ci-grpo: {reason}" in line


def test_another_configuration_for_a_run_that_is_there_proposes_a_name(tmp_path, capsys):
    folder = tmp_path / "ci-grpo"
    (folder / "checkpoints" / "00000001").mkdir(parents=True)
    assert cli.main(["train", "--config", CI, "--dry_run"]) == 0
    saved = json.loads(capsys.readouterr().out)
    (folder / "config.json").write_text(json.dumps(saved))
    line = refused(tmp_path, capsys, 3, "recipe.name=bf16")
    assert "recipe.name: saved 'qat_w4a4', now 'bf16'" in line
    assert line.endswith("a run of its own takes another name, e.g. --set run.name=ci-grpo-2\n")


@pytest.mark.parametrize(
    "command, words, missing",
    [
        ("train", (), "[model], nor [task]"),
        ("train", ("--set=run.name=x",), "[model], nor [task]"),
        ("train", ("--set=model.path=x",), "[task]"),
        ("sft", ("--set=task.name=arithmetic",), "[model]"),
        ("sft", ("--set=model.path=x",), "[sft] or [task]"),
    ],
)
def test_training_something_that_nobody_named_is_refused(command, words, missing, capsys):
    assert cli.main([command, *words]) == 2
    line = capsys.readouterr().err
    assert (
        line.startswith(f"fp4rl {command}: nothing sets {missing}: give a configuration")
        and line.count("\n") == 1
    )
    assert cli.main([command, *words, "--dry_run"]) == 0


def test_one_code_for_a_run_that_is_not_there(tmp_path):
    for words in (["eval", f"--run={tmp_path}"], ["sample", f"--run={tmp_path}"], ["report", str(tmp_path)]):
        assert cli.main(words) == 3


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, capsys):
    assert cli.main([command, f"--out={tmp_path / 'none' / 'a.jsonl'}"]) == 2
    assert f"a.jsonl: no folder {tmp_path / 'none'} that can be written" in capsys.readouterr().err
    assert cli.main([command, f"--out={tmp_path}"]) == 2
    assert f"--out {tmp_path} is a folder" in capsys.readouterr().err


def test_prompts_that_are_no_file_are_said_so(capsys):
    assert cli.main(["sample", "--prompts=What is 2 + 2?"]) == 2
    line = capsys.readouterr().err
    assert "--prompts 'What is 2 + 2?' is not a file: it takes a text file with one prompt a line" in line
