"""Naming another plug-in over a section: what is dropped, what is said, what stays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from absl import logging

from fp4rl_jax import config
from fp4rl_jax.configuring import ConfigError, merge_layers


def _merged(*layers: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    return merge_layers(config.Config, layers)


def test_another_algorithm_begins_with_its_published_settings() -> None:
    """clip_high is a key of both and still GRPO's; std_eps is at its default and not worth a word."""
    old = {"algorithm": {"name": "grpo", "clip_high": 0.3, "std_eps": 1e-6}}
    values, notices = _merged(old, {"algorithm": {"name": "dapo", "clip_low": 0.1}, "loop": {"steps": 2}})
    assert values == {"algorithm": {"name": "dapo", "clip_low": 0.1}, "loop": {"steps": 2}}
    assert notices == (
        "algorithm: 'dapo' over 'grpo' begins the section anew, dropping algorithm.clip_high = 0.3 of an "
        "earlier source; what should stay is set beside the new name",
    )


def test_the_same_name_merges_key_by_key_and_the_default_is_a_name_too() -> None:
    old = {"algorithm": {"clip_high": 0.3}}
    new = {"algorithm": {"name": "grpo", "clip_low": 0.1}}
    assert _merged(old, new) == ({"algorithm": {"name": "grpo", "clip_high": 0.3, "clip_low": 0.1}}, ())
    values, (notice,) = _merged(old, {"algorithm": {"name": "rloo"}})
    assert values == {"algorithm": {"name": "rloo"}} and "'rloo' over 'grpo'" in notice


@pytest.mark.parametrize(
    "first, second, left, said",
    [
        # another shared name: sides and shared keys go
        (
            {"name": "qat_w4a4", "sites": "routed_experts", "rollout": {"name": "fp8_rollout"}},
            {"name": "bf16"},
            {"name": "bf16"},
            ["recipe.sites = 'routed_experts'", "recipe.rollout = {name = 'fp8_rollout'}"],
        ),
        # a run's config.json that gives each side: one name for both over it
        (
            {"trainer": {"name": "bf16"}, "rollout": {"name": "qat_w4a4", "sites": "block_linears"}},
            {"name": "bf16"},
            {"name": "bf16"},
            ["recipe.trainer = {name = 'bf16'}"],
        ),
        # one side's name: its own keys go, shared ones stay for the other
        (
            {"name": "qat_w4a4", "sites": "routed_experts", "rollout": {"sites": "block_linears"}},
            {"rollout": {"name": "bf16"}},
            {"name": "qat_w4a4", "sites": "routed_experts", "rollout": {"name": "bf16"}},
            [],
        ),
        # both sides named over a shared name
        (
            {"name": "qat_w4a4", "sites": "routed_experts"},
            {"trainer": {"name": "bf16"}, "rollout": {"name": "fp8_rollout"}},
            {"trainer": {"name": "bf16"}, "rollout": {"name": "fp8_rollout"}},
            ["recipe.sites = 'routed_experts'"],
        ),
        # nothing but keys over it
        ({"name": "qat_w4a4"}, {"sites": "x"}, {"name": "qat_w4a4", "sites": "x"}, []),
    ],
)
def test_recipes_on_two_sides(
    first: Mapping[str, Any], second: Mapping[str, Any], left: Mapping[str, Any], said: list[str]
) -> None:
    values, notices = _merged({"recipe": first}, {"recipe": second})
    assert values == {"recipe": left}
    assert all(any(part in notice for notice in notices) for part in said)
    assert bool(notices) == bool(said)


def test_every_plug_in_section_and_the_command_line_as_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda form, *words: said.append(form % words))
    file = tmp_path / "mine.toml"
    file.write_text("[correction]\nname = 'icepop'\nlow = 0.4\n[task]\nname = 'arithmetic'\nterms = 3\n")
    built = config.load([str(file)], ["correction.name=sequence_mask", "task.name=arithmetic"])
    assert (built.correction.name, built.correction.config.low) == ("sequence_mask", 0.999)
    assert built.task.config.terms == 3
    (line,) = said
    assert "correction: 'sequence_mask' over 'icepop'" in line and "correction.low = 0.4" in line
    # words before and after the name on one command line belong together
    kept = config.load([str(file)], ["correction.low=0.9", "correction.name=sequence_mask"])
    assert kept.correction.config.low == 0.9
    with pytest.raises(ConfigError, match=r"unknown config key 'task\.terms'"):
        config.load([str(file)], ["task.name=gsm8k", "task.terms=2"])


def test_a_name_that_does_not_exist_is_still_refused_by_its_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dapo'"):
        config.load([], ["algorithm.name=dapoo"])
    values, _ = _merged({"algorithm": {"name": "grpoo", "clip_high": 1.0}}, {"algorithm": {"name": "dapo"}})
    assert values == {"algorithm": {"name": "dapo"}}
