"""Arithmetic: the problems, their split, and their reward."""

import ast
import operator

import pytest

from fp4rl_jax.tasks import arithmetic

OPS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def _expression(item):
    return item.prompt.removeprefix("What is ").removesuffix("? Answer with the number only.")


def _evaluated(text):
    """Python's own value of an expression of + - * and integers."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand)
        return node.value

    return value(ast.parse(text, mode="eval").body)


def _sample(source, count=200):
    return [source[index] for index in range(0, len(source), max(1, len(source) // count))]


def test_default_is_the_demo_sums_with_a_hundred_held_out():
    task = arithmetic.build(arithmetic.Config())
    assert len(task.eval) >= 100 and len(task.train) + len(task.eval) == 13 * 13
    assert len(task.train) >= 68
    pairs = {frozenset(_expression(item).split(" + ")) for item in _sample(task.train, 999)}
    held_out = {frozenset(_expression(item).split(" + ")) for item in _sample(task.eval, 999)}
    assert not pairs & held_out and len(pairs) + len(held_out) == 91


@pytest.mark.parametrize("seed", range(5))
def test_every_seed_holds_out_a_hundred_and_keeps_both_orders_together(seed):
    task = arithmetic.build(arithmetic.Config(seed=seed))
    assert 100 <= len(task.eval) <= 101
    held_out = {_expression(item) for item in _sample(task.eval, 999)}
    assert all(" + ".join(reversed(text.split(" + "))) in held_out for text in held_out)


def test_prompt_and_answer():
    task = arithmetic.build(arithmetic.Config())
    item = next(item for item in _sample(task.train, 999) if item.answer == "14")
    assert item.messages[0]["role"] == "user" and len(item.messages) == 1
    assert item.prompt.startswith("What is ") and item.prompt.endswith("? Answer with the number only.")


@pytest.mark.parametrize(
    "config",
    [
        arithmetic.Config(operations=("+", "-", "*"), terms=3, high=5),
        arithmetic.Config(operations=("-", "*"), low=-4, high=4, eval_size=20),
        arithmetic.Config(operations=("+", "-", "*"), terms=4, digits=3, train_size=500),
    ],
)
def test_answers_are_pythons_and_sides_are_disjoint(config):
    task = arithmetic.build(config)
    for item in _sample(task.train) + _sample(task.eval):
        assert _evaluated(_expression(item)) == int(item.answer), item
    assert not {item.key for item in _sample(task.train, 9999)} & {item.key for item in task.eval}
    assert len(task.eval) >= config.eval_size


@pytest.mark.parametrize(
    "left, right",
    [
        (((3, 4), ("+",)), ((4, 3), ("+",))),
        (((2, 3, 4), ("*", "+")), ((4, 3, 2), ("+", "*"))),
        (((1, 2, 3), ("-", "+")), ((1, 3, 2), ("+", "-"))),
    ],
)
def test_commuted_problems_have_one_key(left, right):
    assert arithmetic._key(left) == arithmetic._key(right)


def test_different_problems_have_different_keys():
    keys = {
        arithmetic._key(((a, b), (op,))) for a, b, op in [(3, 4, "+"), (3, 4, "-"), (4, 3, "-"), (3, 4, "*")]
    }
    assert len(keys) == 4


def test_large_tasks_are_made_when_asked_for_and_repeat():
    config = arithmetic.Config(digits=9, terms=5, train_size=10**12)
    first, second = arithmetic.build(config), arithmetic.build(config)
    for index in (0, 12_345, 10**12 - 1):
        assert first.train[index] == second.train[index]
    assert first.train[0] != first.train[1]
    assert [item.key for item in first.eval] == [item.key for item in second.eval]


def test_reward_terms():
    task = arithmetic.build(arithmetic.Config(format_weight=0.25))
    item = task.train[0]
    gold = item.answer
    cases = [(gold, 1.0), (f"It is {gold}.", 0.75), (str(int(gold) + 1), 0.25), ("no idea", 0.0)]
    assert [task.reward(item, text).value for text, _ in cases] == [value for _, value in cases]
    assert [task.reward(item, text).correct for text, _ in cases] == [True, True, False, False]
    assert task.reward(item, f"{gold}.").parts == {"correct": 1.0, "format": 0.0}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"operations": ("/",)}, "unknown operation '/'"),
        ({"operations": ()}, "operations are"),
        ({"operations": ("+", "+")}, "each once"),
        ({"terms": 1}, "terms is 1"),
        ({"low": 5, "high": 5}, "operands are 5..5"),
        ({"digits": 0}, "digits is 0"),
        ({"eval_size": 0}, "eval_size is 0"),
        ({"format_weight": 1.0}, "format_weight is 1.0"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        arithmetic.Config(**options)


@pytest.mark.parametrize("eval_size, message", [(16, "all 16 problems"), (99, "only 16 problems exist")])
def test_too_many_held_out_problems_are_refused(eval_size, message):
    with pytest.raises(ValueError, match=message):
        arithmetic.build(arithmetic.Config(high=3, eval_size=eval_size))
