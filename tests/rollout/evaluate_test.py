"""Evaluation: fixed batches, samples that do not depend on them, numbers from the task's reward."""

import dataclasses

import jax
import numpy as np
import pytest

from fp4rl_jax.rollout import Evaluator, SamplingConfig, evaluate, publish
from fp4rl_jax.tasks import Reward
from tests.rollout import tiny

ITEMS = list(range(5))
PROMPTS, MASK = tiny.prompts(5)


def encode(items):
    return PROMPTS[list(items)], MASK[list(items)]


def decode(ids) -> str:
    return " ".join(map(str, ids))


def reward(item: int, completion: str) -> Reward:
    """Correct when the first sampled id is even."""
    first = int(completion.split()[0])
    return Reward(value=first / 100 + item, correct=first % 2 == 0)


def evaluator(**options) -> Evaluator:
    _, side = tiny.sides("bf16", tiny.DENSE, order="fixed")
    base = Evaluator(
        encode=encode, decode=decode, reward=reward, config=tiny.DENSE, side=side,
        sampling=SamplingConfig(max_new_tokens=4, stop_tokens=(2,)), batch_prompts=2, num_samples=3,
    )  # fmt: skip
    return dataclasses.replace(base, **options)


def policy():
    return publish(tiny.params("dense"), config=tiny.DENSE, side=evaluator().side, version=9)


@pytest.mark.slow
def test_batch_size_changes_nothing():
    key = jax.random.key(3)
    two = evaluate(policy(), ITEMS, key, evaluator=evaluator(batch_prompts=2))
    five = evaluate(policy(), ITEMS, key, evaluator=evaluator(batch_prompts=5))
    assert two.completions == five.completions and two.params_version == 9
    np.testing.assert_array_equal(two.rewards, five.rewards)
    assert two.rewards.shape == two.correct.shape == two.lengths.shape == (5, 3)


def test_numbers_come_from_the_completions():
    found = evaluate(policy(), ITEMS, jax.random.key(3), evaluator=evaluator())
    firsts = np.array([[int(text.split()[0]) for text in texts] for texts in found.completions])
    np.testing.assert_array_equal(found.correct, firsts % 2 == 0)
    np.testing.assert_allclose(found.rewards, firsts / 100 + np.arange(5)[:, None], rtol=1e-6)
    np.testing.assert_array_equal(
        found.lengths, [[len(t.split()) for t in texts] for texts in found.completions]
    )
    assert found.mean_at_k().value == pytest.approx(found.correct.mean())
    curve = found.pass_at((1, 3))
    assert curve[1].value == pytest.approx(found.correct.mean())
    assert curve[3].value == pytest.approx(found.correct.any(axis=1).mean())
    assert curve[3].value >= curve[1].value
    assert found.mean_reward().value == pytest.approx(float(found.rewards.mean()), rel=1e-6)


def test_greedy_is_one_sample_with_a_wilson_interval():
    greedy = SamplingConfig(max_new_tokens=4, temperature=0.0)
    found = evaluate(policy(), ITEMS, jax.random.key(0), evaluator=evaluator(sampling=greedy, num_samples=1))
    assert found.mean_at_k().method == "wilson" and found.mean_at_k().count == 5
    again = evaluate(policy(), ITEMS, jax.random.key(1), evaluator=evaluator(sampling=greedy, num_samples=1))
    assert found.completions == again.completions
    with pytest.raises(ValueError, match="num_samples must be 1, got 4"):
        evaluator(sampling=greedy, num_samples=4)


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="at least one task item, got 0"):
        evaluate(policy(), [], jax.random.key(0), evaluator=evaluator())
