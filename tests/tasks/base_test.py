"""The checks around every reward function."""

import pytest

from fp4rl_jax.tasks import Item, Reward, RewardError, Task

ITEM = Item(key="k", messages=({"role": "user", "content": "What is 1 + 1?"},), answer="2")


def _task(scorer):
    return Task(name="mine", train=[ITEM], eval=[], scorer=scorer)


@pytest.mark.parametrize(
    "score, value, correct, parts",
    [
        (1.0, 1.0, True, {}),
        (0, 0.0, False, {}),
        (True, 1.0, True, {}),
        (0.5, 0.5, False, {}),
        ((1.5, {"a": 1}), 1.5, True, {"a": 1.0}),
        (Reward(value=0.2, correct=True, parts={"b": 0}), 0.2, True, {"b": 0.0}),
    ],
)
def test_what_a_scorer_may_return(score, value, correct, parts):
    reward = _task(lambda item, text: score).reward(ITEM, "2")
    assert (reward.value, reward.correct, dict(reward.parts)) == (value, correct, parts)


@pytest.mark.parametrize(
    "score, problem",
    [
        (None, "reward is None"),
        (float("nan"), "reward is nan"),
        (float("inf"), "reward is inf"),
        ("1", "reward is '1'"),
        ((1.0, {"part": None}), "part 'part' is None"),
        (Reward(value=float("nan"), correct=False), "reward is nan"),
        ([1.0], "float"),
    ],
)
def test_anything_else_names_the_prompt(score, problem):
    with pytest.raises(RewardError, match=problem) as caught:
        _task(lambda item, text: score).reward(ITEM, "two")
    assert (
        "What is 1 + 1?" in str(caught.value) and "'two'" in str(caught.value) and "mine" in str(caught.value)
    )


def test_an_exception_names_the_prompt_and_keeps_its_cause():
    def broken(item, completion):
        return item.row["missing"]

    with pytest.raises(RewardError, match="KeyError: 'missing'") as caught:
        _task(broken).reward(ITEM, "2")
    assert isinstance(caught.value.__cause__, KeyError)
    assert "What is 1 + 1?" in str(caught.value)


def test_an_interrupt_is_no_reward_error():
    def stopped(item, completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _task(stopped).reward(ITEM, "2")


def test_long_texts_are_shortened_in_messages():
    with pytest.raises(RewardError) as caught:
        _task(lambda item, text: None).reward(ITEM, "x" * 10_000)
    assert len(str(caught.value)) < 600
