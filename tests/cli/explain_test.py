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


def test_what_guides_the_trainer_is_explained() -> None:
    told = explain(config.load([CI], ["recipe.name=trace"]))
    assert "trainer  nvfp4   nvfp4(outer=row, guided)" in told
    assert "kv cache: trainer nvfp4(outer=static, guided), rollout nvfp4(outer=static)" in told
    # width 64: 8 bytes of bits, 4 scales, 4 of outer scale; 2 x 2 rows of head_dim 16: 8 of codes, one scale
    assert "recorded: mlp/gate_up compact, kv full, layers 1 to 1, 52 bytes a token" in told
    plain = explain(config.load([CI]))
    assert "kv cache: trainer -, rollout -" in plain and "recorded: nothing" in plain


def test_how_gradients_are_rounded_and_rotated_is_explained() -> None:
    chosen = ["recipe.name=rollout_resq", "recipe.rounding=stochastic", "recipe.rotation=hadamard16"]
    told = explain(config.load([CI], chosen))
    assert "requantized, hadamard16, dy hif4(scale_rounding=up, stochastic)" in told


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


def test_defaults_of_a_plugin_that_was_chosen_are_not_settings() -> None:
    shown = explain(config.load([CI], ["algorithm.name=dapo"])).rpartition("Configuration, where")[2]
    assert 'recipe.name = "qat_w4a4"' in shown and 'algorithm.name = "dapo"' in shown
    assert "recipe.backward" not in shown and "algorithm.clip_high" not in shown
    sides = ["recipe.trainer.name=quads", "recipe.rollout.name=quads", "recipe.rollout.ratio=0.25"]
    shown = explain(config.load([CI], sides)).rpartition("Configuration, where")[2]
    assert "recipe.rollout.ratio = 0.25" in shown and "recipe.trainer.ratio" not in shown
