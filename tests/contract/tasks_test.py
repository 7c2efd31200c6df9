"""Every file in tasks/ through one suite. No task is named here."""

import dataclasses
import math

import pytest

from fp4rl_jax import plugins, tasks

NAMES = plugins.names(tasks)


@pytest.fixture(params=NAMES, scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def built(name, tmp_path_factory):
    module = plugins.load(tasks, name)
    try:
        return module.build(module.example_config(tmp_path_factory.mktemp(name)))
    except ModuleNotFoundError as error:  # an optional package; `make test-all` installs them all
        pytest.skip(str(error))


def _items(source):
    return [source[index] for index in range(len(source))]


def test_some_tasks_exist():
    assert len(NAMES) >= 5


def test_config_is_frozen_and_hashable_by_value(name, tmp_path):
    module = plugins.load(tasks, name)
    first, second = (module.example_config(tmp_path) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert hash(module.Config()) == hash(module.Config())  # every field has a default
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(first, dataclasses.fields(first)[0].name, None)


def test_name_is_the_file_name(name, built):
    assert built.name == name


def test_train_and_eval_share_no_problem(built):
    train, held_out = ({item.key for item in _items(side)} for side in (built.train, built.eval))
    assert train and held_out and not train & held_out
    prompts = [{" ".join(item.prompt.split()) for item in _items(side)} for side in (built.train, built.eval)]
    assert not prompts[0] & prompts[1]


def test_items_are_chats_that_end_with_the_user(built):
    for item in _items(built.train) + _items(built.eval):
        assert item.messages and item.messages[-1]["role"] == "user" and item.prompt.strip()
        assert all(set(message) == {"role", "content"} for message in item.messages)


def test_sources_are_random_access_and_repeatable(name, built, tmp_path):
    module = plugins.load(tasks, name)
    again = module.build(module.example_config(tmp_path))
    for side in ("train", "eval"):
        first, second = getattr(built, side), getattr(again, side)
        assert [item.key for item in _items(first)] == [item.key for item in _items(second)]
        assert first[len(first) - 1] == second[len(second) - 1]
        with pytest.raises(IndexError):
            first[len(first)]


def test_gold_earns_full_marks_and_silence_none(built):
    for item in [*_items(built.train)[:4], *_items(built.eval)[:4]]:
        assert item.answer
        gold, silent = built.reward(item, item.answer), built.reward(item, "")
        assert gold.correct and gold.value == 1.0
        assert not silent.correct and silent.value == 0.0
        assert set(gold.parts) == set(silent.parts)


def test_any_text_has_a_finite_reward(built):
    for text in ("", "I do not know.", "<answer>", "\\boxed{", "####", "\x00", "9" * 5000, "-"):
        reward = built.reward(built.train[0], text)
        assert math.isfinite(reward.value) and 0.0 <= reward.value < 1.0 and not reward.correct, text
        assert all(math.isfinite(part) for part in reward.parts.values())


def test_rewards_are_in_order(built):
    items = _items(built.train)[:2]
    values = [r.value for r in built.rewards([*items, items[0]], [items[0].answer, "", items[0].answer])]
    assert values == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        built.rewards(items, ["one"])
