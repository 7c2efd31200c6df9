"""`fp4rl explain` says what the loss is made of."""

from pathlib import Path

import pytest

from fp4rl_jax import config
from fp4rl_jax.cli import main
from fp4rl_jax.cli.explain import explain

CI = str(Path(__file__).parents[2] / "configs" / "ci" / "grpo.toml")


def test_the_loss_is_explained() -> None:
    plain = explain(config.load([CI]))
    assert "correction: tis" in plain and "TRIAGE gate: off" in plain and "TRIAGE repair: off" in plain
    told = explain(config.load([CI], ["triage.gate.scope=q3", "triage.repair.scope=adv_positive"]))
    assert "TRIAGE gate: scope q3, segments of 64 tokens, weighted mean over the whole update" in told
    assert "TRIAGE repair: scope adv_positive, segments of 128 tokens, coef 0.015" in told


def test_the_table_comes_before_what_the_configuration_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--config", CI, "--set=recipe.name=naive_nvfp4"]) == 0
    out = capsys.readouterr().out
    assert (
        out.index("\nSites\n") < out.index("\nDifference\n") < out.index("\nConfiguration, where it is not")
    )
    assert '\n  recipe.name = "naive_nvfp4"\n' in out and "\n  loop.steps = 2\n" in out
    assert "loop.max_rounds" not in out  # the default


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("triage.gate.segment=0", "triage.gate.segment is 0, expected at least 1"),
        ("triage.gate.scope=q1", "triage.gate.scope: unknown value 'q1'"),
        ("triage.repiar.scope=all", "did you mean 'triage.repair'"),
    ],
)
def test_a_wrong_setting_is_refused_by_key(wrong: str, message: str) -> None:
    with pytest.raises(config.ConfigError, match=message):
        config.load([CI], [wrong])
