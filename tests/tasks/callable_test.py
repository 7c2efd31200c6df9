"""A user's own reward function and prompts."""

import json
import sys

import pytest

from fp4rl_jax.tasks import RewardError
from fp4rl_jax.tasks import callable as task_callable

CODE = """
def reward(item, completion):
    if completion == "raise":
        raise ZeroDivisionError("oops")
    if completion == "none":
        return None
    if completion == "changed":
        return 0.5, {"other": 1.0}
    return float(completion == item.row["target"]), {"length": len(completion)}

def rows():
    return [{"prompt": f"Say {n}", "target": str(n)} for n in range(40)]

def chats():
    system = {"role": "system", "content": "Be brief."}
    return [{"messages": [system, {"role": "user", "content": question}]} for question in "xyz"]

def nothing():
    return None

def bad():
    return [{"text": "no prompt"}]
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "my_reward.py").write_text(CODE)
    rows = [{"prompt": f"Say {word}.", "target": word, "extra": [1]} for word in ("a", "b", "c")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (tmp_path / "e.jsonl").write_text(json.dumps(rows[2]) + "\n")
    return tmp_path


def _config(here, **fields):
    file = here / "my_reward.py"
    defaults = {"reward": f"{file}:reward", "train": str(here / "p.jsonl"), "eval": str(here / "e.jsonl")}
    return task_callable.Config(**defaults | fields)


def test_prompts_from_files(here):
    task = task_callable.build(_config(here))
    assert [task.train[i].prompt for i in range(2)] == ["Say a.", "Say b."]
    assert task.eval[0].row == {"prompt": "Say c.", "target": "c", "extra": [1]}
    reward = task.reward(task.train[0], "a")
    assert (reward.value, reward.correct, dict(reward.parts)) == (1.0, True, {"length": 1.0})


def test_prompts_from_code_are_split_by_share(here):
    task = task_callable.build(_config(here, train=f"{here}/my_reward.py:rows", eval="", eval_share=0.3))
    assert len(task.train) + len(task.eval) == 40 and len(task.eval) >= 4


def test_chats_keep_their_messages(here):
    train, held_out = f"{here}/my_reward.py:chats", f"{here}/my_reward.py:rows"
    item = task_callable.build(_config(here, train=train, eval=held_out)).train[0]
    assert [m["role"] for m in item.messages] == ["system", "user"] and item.prompt == "x"


def test_by_module_name(here, monkeypatch):
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    task = task_callable.build(_config(here, reward="my_reward:reward"))
    assert task.reward(task.train[1], "b").value == 1.0
    sys.modules.pop("my_reward")


@pytest.mark.parametrize("completion, problem", [("none", "part|None"), ("raise", "ZeroDivisionError: oops")])
def test_a_broken_reward_names_the_prompt(here, completion, problem):
    task = task_callable.build(_config(here))
    with pytest.raises(RewardError, match=problem) as caught:
        task.reward(task.train[0], completion)
    assert "'Say a.'" in str(caught.value)


def test_parts_must_be_the_same_every_time(here):
    task = task_callable.build(_config(here))
    task.reward(task.train[0], "a")
    with pytest.raises(RewardError, match=r"parts \['other'\].*before \['length'\]"):
        task.reward(task.train[0], "changed")


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"reward": ""}, ValueError, "task.reward is not set: .*my_reward.py:reward"),
        ({"reward": "no_colon"}, ValueError, "expected 'module:function'"),
        ({"train": ""}, ValueError, "train is not set"),
        ({"reward": "{here}/my_reward.py:rewards"}, ValueError, "did you mean 'reward'"),
        ({"reward": "{here}/absent.py:reward"}, FileNotFoundError, "absent.py"),
        (
            {"reward": "absent_module_xyz:reward"},
            ValueError,
            "reward: Python finds no module .absent_module_xyz.",
        ),
        ({"train": "{here}/my_reward.py:rows"}, ValueError, "both files or both functions"),
        ({"train": "{here}/my_reward.py:nothing", "eval": ""}, ValueError, "returned NoneType"),
        ({"train": "{here}/my_reward.py:bad", "eval": ""}, ValueError, "row 0.*no 'prompt'"),
        ({"eval_share": 1.0}, ValueError, "eval_share is 1.0"),
    ],
)
def test_what_cannot_work_is_refused(here, fields, error, message):
    with pytest.raises(error, match=message):
        task_callable.build(
            _config(here, **{k: v.format(here=here) if isinstance(v, str) else v for k, v in fields.items()})
        )
