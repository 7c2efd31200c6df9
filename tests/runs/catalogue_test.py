"""docs/RUNS.md says what the code does: metrics keys, exit codes, files, manifest keys."""

from pathlib import Path

import jax.numpy as jnp

from fp4rl_jax.objectives.mismatch import mismatch_metrics
from fp4rl_jax.runs import build_manifest, catalogue, exit_codes
from fp4rl_jax.runs.config import RunConfig
from fp4rl_jax.runs.directory import CONFIG, EVALS, MANIFEST, METRICS, TRANSCRIPTS

TEXT = (Path(__file__).parents[2] / "docs" / "RUNS.md").read_text()


def test_the_metrics_table_is_the_catalogue():
    assert catalogue.markdown_table() in TEXT
    assert {"step", "reward_mean", "mismatch_kl", "logprob_gap_max", "tokens_per_second"} <= {
        metric.key for metric in catalogue.CATALOGUE
    }


def test_exit_codes_files_and_manifest_keys_are_documented():
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"| {code} | {meaning} |" in TEXT
    for name in (CONFIG, EVALS, MANIFEST, METRICS, TRANSCRIPTS):
        assert f"| `{name}` |" in TEXT
    manifest = build_manifest(seed=0, implementations={}, numerics={})
    assert [key for key in manifest if f"`{key}`" not in TEXT] == []


def test_every_mismatch_metric_is_documented_by_name():
    zeros = jnp.zeros((1, 2))
    found = mismatch_metrics(zeros, zeros, jnp.ones((1, 2), bool))
    exact = {metric.key for metric in catalogue.CATALOGUE}
    assert sorted(set(found) - exact) == [] and len(found) >= 25


def test_families_match_and_unknown_keys_do_not():
    keys = ["quant/rollout/attn/qkv/underflow", "reward/correct", "update_seconds", "mismatch_kl", "surprise"]
    assert catalogue.undocumented(keys) == ["surprise"]
    exact = catalogue.find("step_seconds")
    assert exact is not None and exact.key == "step_seconds"


def test_a_record_without_its_clock_is_what_a_resume_repeats():
    record = {"step": 3, "reward_mean": 0.5, "tokens_per_second": 9.0, "rollout_seconds": 1.0, "surprise": 1}
    assert catalogue.without_clock(record) == {"step": 3, "reward_mean": 0.5, "surprise": 1}


def test_a_wrong_run_section_names_the_key_and_the_number():
    for change, message in (
        ({"name": "a/b"}, "run.name must be one folder name, got 'a/b'"),
        ({"keep_last": 0}, "run.keep_last must be at least 1, got 0"),
        ({"checkpoint_every": -1}, "run.checkpoint_every must be 0 or more, got -1"),
        ({"keep_best": "reward_maen"}, "unknown run.keep_best 'reward_maen': did you mean 'reward_mean'?"),
    ):
        try:
            RunConfig(**change).validate(None)
        except ValueError as error:
            assert str(error).startswith(message)
        else:
            raise AssertionError(f"{change} was accepted")
