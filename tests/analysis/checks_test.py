"""Each check fails on the fault that it is for, names it, and says why where it does not apply."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import cli, models, ops
from fp4rl_jax.analysis import checks, forced
from fp4rl_jax.analysis.reproduced import reproduced
from fp4rl_jax.cli import _experiment, _flags, check
from fp4rl_jax.rollout import Published, weight_checksums
from fp4rl_jax.runs import exit_codes
from tests.analysis import pairs
from tests.rollout import tiny

CI = Path(__file__).parents[2] / "configs" / "ci"


def test_one_changed_weight_code_is_named() -> None:
    trainer, rollout = tiny.sides("qat_w4a4", pairs.CONFIGS["dense"])
    sides = {"trainer_side": trainer, "rollout_side": rollout}
    weight = trainer.specs["mlp/down"].weight
    assert weight is not None
    w = np.linspace(-3, 3, 2 * 4 * 32, dtype=np.float32).reshape(2, 4, 32)
    q = jax.jit(lambda w: ops.quantize_weight(w, weight))(w)
    tree = {"layers": {"mlp": {"gate_up": q, "down": q}}}
    ours = checks.used_checksums(tree)
    good = checks.weight_codes(checks.used_checksums(tree), ours, **sides)
    assert good.status == "ok" and good.seen == "equal at mlp/down, mlp/gate_up"
    published = Published(params=tree, version=jnp.int32(0), checksums=ours, stats={})
    bad = checks.used_checksums(pairs.changed_code(published).params)
    found = checks.weight_codes(bad, ours, **sides)
    assert found.status == "FAILED" and "mlp/down codes in layers [1]" in found.seen
    assert "gate_up" not in found.seen
    assert checks.findings_failed([good, found]) and not checks.findings_failed([good])
    none = checks.weight_codes({}, {}, **sides)
    assert none.status == "not applicable" and none.reason == "neither side quantizes a weight"


def test_what_may_differ_is_a_reason_and_no_failure() -> None:
    config = pairs.CONFIGS["dense"]
    trainer, rollout = tiny.sides("qat_w4a4", config, order="fixed")
    assert checks.pair_reasons(trainer, rollout) == []
    assert checks.pair_reasons(*tiny.sides("trace", config, order="fixed")) == []  # guidance is none
    other = dataclasses.replace(trainer, dtype="bfloat16")
    assert checks.pair_reasons(other, rollout) == ["trainer.dtype = 'bfloat16', rollout.dtype = 'float32'"]
    found = checks.pair_reasons(*tiny.sides("rollout_resq", config, order="fixed"))
    assert found == ["residual differs at attn/qkv, attn/out, mlp/gate_up, mlp/down"]
    assert "ops.order = 'free'" in checks.pair_reasons(*tiny.sides("bf16", config))[0]


def observed(**changes: np.ndarray) -> checks.Observed:
    mask = np.array([[False, True, True]])
    values = {
        "tokens": np.array([[1, 2, 3]]),
        "rollout_logprobs": np.array([[0.0, -1.0, -2.0]], np.float32),
        "trainer_logprobs": np.array([[0.0, -1.5, -2.0]], np.float32),
    }
    return checks.Observed(**{**values, **changes, "loss_mask": mask})


def test_a_gap_that_moves_without_learning_fails() -> None:
    flat = checks.gap_is_flat([observed()] * 3)
    assert flat.status == "ok" and flat.seen == "mean gap 0.25, 0.25, 0.25 nats"
    moved = observed(trainer_logprobs=np.nextafter(observed().trainer_logprobs, np.float32(0)))
    found = checks.gap_is_flat([observed(), observed(), moved])
    assert found.status == "FAILED" and "step 2 differ from step 0" in found.seen


@pytest.mark.slow
def test_two_equal_sides_pass_and_a_sampler_that_drifts_fails_both_equalities() -> None:
    drawn = pairs.drawn("qat_w4a4")
    sides = {"trainer_side": drawn.trainer, "rollout_side": drawn.rollout}
    blocks = forced.by_blocks(
        drawn.published.params, drawn.out, config=drawn.config, side=drawn.rollout, temperature=1.0
    )
    assert checks.prefill_is_decode(blocks.logprobs, drawn.out, drawn.rollout).status == "ok"
    assert checks.ratio_is_one(drawn.scores, drawn.out, **sides).status == "ok"
    ours = weight_checksums(drawn.params, config=drawn.config, side=drawn.trainer)
    codes = checks.weight_codes(checks.used_checksums(drawn.published.params), ours, **sides)
    assert codes.status == "ok" and codes.seen == "equal at attn/out, attn/qkv, mlp/down, mlp/gate_up"
    wrong = drawn.out.rollout_logprobs.copy()
    place = tuple(np.argwhere(drawn.out.loss_mask)[3])
    wrong[place] = np.nextafter(wrong[place], np.float32(0))
    out = dataclasses.replace(drawn.out, rollout_logprobs=wrong)
    for found in (
        checks.prefill_is_decode(blocks.logprobs, out, drawn.rollout),
        checks.ratio_is_one(drawn.scores, out, **sides),
    ):
        assert found.status == "FAILED" and "of 17 tokens differ" in found.seen
    free = dataclasses.replace(drawn.rollout, order="free")
    assert checks.prefill_is_decode(blocks.logprobs, out, free).status == "not applicable"


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, model, name", [("trace", "dense", "mlp/gate_up"), ("qat_w4a4", "moe", "router")]
)
def test_a_record_of_the_token_before_fails(recipe: str, model: str, name: str) -> None:
    drawn = pairs.drawn(recipe, model, replay="on" if model == "moe" else "off")
    tree = jax.jit(models.fuse)(drawn.params)

    def found(out) -> checks.Finding:
        sides = {"trainer": drawn.trainer, "rollout": drawn.rollout}
        record, again, followed = reproduced(
            drawn.published.params, tree, out, config=drawn.config, temperature=1.0, **sides
        )
        assert name in record and set(again) == set(followed) == set(record)
        return checks.records_reproduce(
            "records", record, rollout=again, trainer=followed,
            trainer_side=drawn.trainer, rollout_side=drawn.rollout,
        )  # fmt: skip

    assert found(drawn.out).status == "ok"
    late = found(pairs.shifted(drawn.out, name))
    assert late.status == "FAILED" and f"{name} equal" not in late.seen.partition("trainer")[0]


@pytest.mark.parametrize(
    "status, code", [("ok", exit_codes.OK), ("not applicable", exit_codes.OK), ("FAILED", exit_codes.CHECK)]
)
def test_the_exit_code_is_that_of_the_worst_finding(status, code, monkeypatch, capsys) -> None:
    findings = [
        checks.Finding(name="first", status="ok", seen="1", expected="1"),
        checks.Finding(name="second", status=status, seen="2", expected="1"),
    ]
    monkeypatch.setattr(_experiment, "draw", lambda config: config)
    monkeypatch.setattr(check, "run", lambda case: findings)
    assert cli.main(["check", "--config", str(CI / "grpo.toml")]) == code
    assert capsys.readouterr().out.splitlines()[1] == f"second: {status}; seen: 2; expected: 1"


@pytest.mark.slow
def test_the_command_says_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(CI / "moe.toml"), "--num_prompts", "1", "--max_new_tokens", "3"]
    assert cli.main(["check", *words]) == exit_codes.OK
    found = [line.split("; ")[0] for line in capsys.readouterr().out.splitlines()]
    assert found == [
        "weight codes equal after publish: ok",
        "prefill = decode: ok",
        "ratio = 1: ok",
        "guidance reproduces: not applicable",
        "routing reproduces: ok",
        "flat gap at learning rate 0: ok",
    ]
    # a run that does learn is not flat
    values = _flags.config_flags()
    _experiment.define_flags(values)
    _flags.parse(values, words, name="check", summary="")
    bounded = _experiment.in_kept_order(_experiment.bounded(_flags.load_config(values), values))
    optim = dataclasses.replace(bounded.trainer.optim, lr=1e-2)
    learns = dataclasses.replace(bounded, trainer=dataclasses.replace(bounded.trainer, optim=optim))
    flat = check.flat(_experiment.draw(learns))
    assert flat.status == "FAILED" and "differ from step 0" in flat.seen
