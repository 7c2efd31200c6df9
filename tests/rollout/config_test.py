"""Sampling descriptions: what is refused, where, and with which words."""

import dataclasses

import pytest

from fp4rl_jax.rollout import RolloutConfig, SamplingConfig, refuse_for_training


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.0}, "temperature = 0.0 is greedy"),
        ({"temperature": -1.0}, "temperature = -1.0 is greedy"),
        ({"top_k": 20}, "top_k = 20"),
        ({"top_p": 0.9}, "top_p = 0.9"),
        ({"min_p": 0.1}, "min_p = 0.1"),
    ],
)
def test_training_refuses_what_the_trainer_cannot_score(change, words):
    with pytest.raises(ValueError, match=words):
        RolloutConfig(**change).validate(None)
    SamplingConfig(**change)  # evaluation may


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"max_new_tokens": 0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.0},
    ],
)
def test_out_of_range_values_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        SamplingConfig(**change)


def test_equal_descriptions_are_one_static_argument():
    one = RolloutConfig(max_new_tokens=12).sampling(stop_tokens=(2,), pad_token=0)
    two = dataclasses.replace(one)
    assert one == two and hash(one) == hash(two)
    assert one.logprob_temperature == 1.0 and not one.is_greedy
    refuse_for_training(one)


def test_greedy_reports_logprobs_at_temperature_one():
    assert SamplingConfig(temperature=0.0).logprob_temperature == 1.0
    assert SamplingConfig(temperature=0.7).logprob_temperature == 0.7
