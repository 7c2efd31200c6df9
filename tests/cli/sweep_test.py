"""`fp4rl sweep`: the matrix of a file, what is refused, a budget over several calls, an arm that fails."""

import contextlib
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fp4rl_jax import cli
from fp4rl_jax.cli import _sweep_file, _sweep_matrix, _sweep_record, _sweep_run
from fp4rl_jax.config import as_dict
from fp4rl_jax.configuring import ConfigError
from fp4rl_jax.loop.stop import StopRequest, stop_on_signals
from fp4rl_jax.runs import Checkpointer, catalogue, exit_codes
from fp4rl_jax.runs.files import dump_json, dump_lines, read_json, read_lines
from tests.processes import CACHE

ROOT = Path(__file__).parents[2]
CI = ROOT / "configs" / "ci" / "grpo.toml"

HEAD = f"""
title = "Test"
root = "ROOT"
config = ["{CI}"]
set = ["run.tensorboard=off", "run.progress=off", "run.transcripts_every=0", "loop.steps=3"]
"""
BF16 = """
[[arms]]
name = "bf16"
set = ["recipe.name=bf16"]
"""
NAIVE = """
[[arms]]
name = "naive"
set = ["recipe.name=naive_nvfp4"]
keys = [7]
"""
EXPECT = 'expect = [{measure = "reward", relation = "above"}]'
#: Runs the programs of bf16.
EASY = """
[[arms]]
name = "easy"
set = ["recipe.name=bf16", "task.high=50"]
keys = [7]
"""


def sweep_file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "sweep.toml"
    file.write_text(text.replace("ROOT", str(tmp_path / "runs")))
    return str(file)


def expand(tmp_path: Path, text: str) -> tuple[_sweep_matrix.Cell, ...]:
    return _sweep_matrix.expand(_sweep_file.load(sweep_file(tmp_path, text)))


def test_arms_factors_and_keys_multiply_in_the_order_of_the_file(tmp_path):
    factors = '[factors]\nengine_gap = ["none", "dtype"]\nloop.group_size = [2, 4]\n'
    cells = expand(tmp_path, HEAD + "keys = [0, 1]\n" + factors + BF16 + NAIVE)
    assert [cell.name for cell in cells] == [
        *(f"bf16-{gap}-{size}-{key}" for gap in ("none", "dtype") for size in (2, 4) for key in (0, 1)),
        *(f"naive-{gap}-{size}-7" for gap in ("none", "dtype") for size in (2, 4)),
    ]
    last = cells[-1].config
    assert (last.engine_gap, last.trainer.dtype, last.rollout.dtype) == ("dtype", "float32", "bfloat16")
    assert (last.loop.group_size, last.run.seed, last.recipe.rollout.name) == (4, 7, "naive_nvfp4")
    assert last.run.path == tmp_path / "runs" / "naive-dtype-4-7" and last.run.resume == "auto"


def test_the_dry_run_prints_the_matrix_and_starts_nothing(tmp_path, capsys):
    assert cli.main(["sweep", sweep_file(tmp_path, HEAD + BF16 + NAIVE), "--dry_run"]) == exit_codes.OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["bf16-0", "to", "do", "0/3", "recipe.name=bf16", "run.seed=0"],
        ["naive-7", "to", "do", "0/3", "recipe.name=naive_nvfp4", "run.seed=7"],
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        (HEAD + BF16 + BF16, "arms: name 'bf16' is there twice"),
        (HEAD + BF16 + BF16.replace('"bf16"', '"other"'), "'bf16-0' and 'other-0' are the same"),
        (HEAD + BF16.replace("=bf16", "=bf61"), "arm 'bf16': recipe.name: unknown recipe 'bf61'"),
        (HEAD + BF16.replace("name=bf16", "nam=bf16"), "unknown config key 'recipe.nam': did you mean"),
        (HEAD + "bugdet = 3\n" + BF16, "unknown config key 'bugdet': did you mean 'budget'?"),
        (HEAD + "[budget]\nseconds = 0\n" + BF16, "budget.seconds = 0.0: expected a finite number above 0"),
        (HEAD + 'baseline = "bf61"\n' + BF16, "unknown baseline 'bf61'"),
        (HEAD + '[factors]\nengine_gap = ["no"]\n' + BF16, "arm 'bf16', engine_gap = no: engine_gap:"),
        (HEAD + '[factors]\nengine_gap = "none"\n' + BF16, "factors.engine_gap: expected a list"),
        (HEAD + '[factors]\nmodel.path = ["a/b"]\n' + BF16, "got 'a/b'"),
        (HEAD + '[factors]\nrecipe.name = ["bf16"]\n' + BF16, "sets 'recipe.name=bf16', and recipe"),
        (HEAD + BF16 + EXPECT.replace("}", ', arm = "x"}'), "unknown expect.arm 'x'"),
        (HEAD + BF16 + EXPECT, "expected one of arm and value"),
        (HEAD + BF16 + EXPECT.replace("reward", "overhead").replace("}", ", value = 1}"), "no baseline"),
        (HEAD + BF16.replace("recipe.name=bf16", "run.seed=3"), "the sweep sets run.name, run.root"),
        (HEAD + "keys = [1, 1]\n" + BF16, "keys: 1 is there twice"),
        (HEAD + 'batch_keys = "on"\n' + BF16, "batch_keys = 'on': an update of several keys in one program"),
        (HEAD + "arms = []", "arms: expected at least one"),
        ('title = "a"\nroot = "b"\n' + BF16, "nothing sets [model], nor [task]"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_work_is_refused_with_the_value(text, message, tmp_path, capsys):
    assert cli.main(["sweep", sweep_file(tmp_path, text)]) == exit_codes.USAGE
    line = capsys.readouterr().err
    assert message in line and line.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_two_runs_never_share_a_folder(tmp_path):
    factors = '[factors]\ntrainer.optim.lr = ["1e-4", "4"]\n'
    with pytest.raises(ConfigError, match="'bf16' and 'bf16-1e' share the folder 'bf16-1e-4-0'"):
        expand(tmp_path, HEAD + factors + BF16 + EASY.replace('"easy"', '"bf16-1e"').replace("[7]", "[0]"))


def test_one_sweep_file_is_asked_for(capsys):
    assert cli.main(["sweep"]) == exit_codes.USAGE
    assert "expected one sweep file, got 0" in capsys.readouterr().err


def metrics(root: Path) -> dict[str, list[dict]]:
    return {
        path.parent.name: [catalogue.without_clock(line) for line in read_lines(path)]
        for path in sorted(root.glob("*/metrics.jsonl"))
    }


def asks_at(monkeypatch, number: int) -> None:
    """Lets the budget be used up when it is asked after for the `number`-th time."""

    class Counted(StopRequest):
        asked = 0

        def agreed(self):
            self.asked += 1
            return "SIGALRM" if self.asked >= number else None

    monkeypatch.setattr(_sweep_run, "stop_on_signals", lambda seconds: contextlib.nullcontext(Counted()))


@pytest.mark.slow
def test_a_sweep_stopped_by_its_budget_is_the_one_that_was_not(tmp_path, monkeypatch):
    """It is asked before a run, before the run's first step and after each of its three."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ["sweep", sweep_file(tmp_path, HEAD + "[budget]\nseconds = 600\n" + BF16 + EASY)]
    assert cli.main([*words, f"--root={whole}"]) == exit_codes.OK
    assert {name: len(lines) for name, lines in metrics(whole).items()} == {"bf16-0": 3, "easy-7": 3}

    states = []
    for number in (3, 7, 1):
        with monkeypatch.context() as patched:
            asks_at(patched, number)
            assert cli.main([*words, f"--root={parts}"]) == exit_codes.SAVED_PLEASE_RESTART
        record = read_json(parts / "sweep.json")
        states.append([(run["state"], run["steps"]) for run in record["runs"]])
    begun = [("done", 3), ("partial", 1)]
    assert states == [[("partial", 1), ("to do", 0)], begun, begun]
    assert cli.main([*words, f"--root={parts}"]) == exit_codes.OK
    assert metrics(parts) == metrics(whole)
    table = (parts / "sweep.md").read_text()
    assert table.count("| 1/1 |") == 2 and (parts / "sweep.png").stat().st_size > 10_000

    def not_again(*_, **__):
        raise AssertionError("a finished run is not run again")

    monkeypatch.setattr(_sweep_run, "train", not_again)
    assert cli.main([*words, f"--root={parts}"]) == exit_codes.OK


@pytest.mark.slow
def test_an_arm_that_fails_is_named_and_stops_no_other(tmp_path, monkeypatch, capsys):
    wide = '[[arms]]\nname = "narrow"\nset = ["recipe.name=bf16", "rollout.prompt_width=20"]\n'
    words = ["sweep", sweep_file(tmp_path, HEAD.replace("steps=3", "steps=1") + wide + BF16)]
    assert cli.main(words) == exit_codes.ARM
    said = capsys.readouterr().out
    assert "- `narrow-0` failed, step 0 of 1: exit code 7:" in said and "the prompt width is 20" in said
    assert [row["state"] for row in read_json(tmp_path / "runs" / "sweep.json")["runs"]] == ["failed", "done"]

    started = []
    train = _sweep_run.train
    monkeypatch.setattr(_sweep_run, "train", lambda *a, **k: started.append(1) or train(*a, **k))
    assert cli.main(words) == exit_codes.ARM and not started  # a failure is kept
    assert cli.main([*words, "--failed=again"]) == exit_codes.ARM and len(started) == 1
    capsys.readouterr()
    assert cli.main([*words, "--only=narrow-0"]) == exit_codes.TASK and len(started) == 2
    said = capsys.readouterr()
    assert said.err.startswith("fp4rl sweep: ") and "the prompt width is 20" in said.err and not said.out
    wider = [*words, "--set=run.keep_last=3", "--set=rollout.max_new_tokens=5"]
    assert cli.main([*wider, "--dry_run"]) == exit_codes.OK
    assert "other config (rollout.max_new_tokens: saved 6, now 5)" in capsys.readouterr().out


def test_a_budget_that_is_over_begins_no_step(tmp_path):
    words = ["sweep", sweep_file(tmp_path, HEAD + BF16), "--seconds=0.001"]
    assert cli.main(words) == exit_codes.SAVED_PLEASE_RESTART
    assert not any(metrics(tmp_path / "runs").values())


def test_the_alarm_asks_once_its_seconds_are_over_and_is_off_after_the_block():
    with stop_on_signals(0.01) as stop:
        end = time.monotonic() + 5
        while stop.agreed() is None and time.monotonic() < end:
            time.sleep(0.005)
        assert stop.agreed() == "SIGALRM"
    with stop_on_signals(30) as stop:
        assert stop.agreed() is None
    time.sleep(0.01)  # the second alarm was taken back; it would end the process


def test_programs_are_kept_under_the_root_unless_jax_was_told_where(tmp_path):
    told = jax.config.jax_compilation_cache_dir
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    _sweep_run.keep_programs(tmp_path)
    assert jax.config.jax_compilation_cache_dir == told
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        _sweep_run.keep_programs(tmp_path)
        assert jax.config.jax_compilation_cache_dir == os.path.join(tmp_path, ".jax_cache")
    finally:
        jax.config.update("jax_compilation_cache_dir", told)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


SWEEPS = [
    path
    for folder in ("ci", "experiments")
    for path in sorted((ROOT / "configs" / folder).glob("*.toml"))
    if "[[arms]]" in path.read_text()
]


@pytest.mark.parametrize("path", SWEEPS, ids=[path.stem for path in SWEEPS])
def test_every_sweep_of_the_repository_resolves(path, monkeypatch):
    """Its configurations are built and validated; no model is read and no device is used."""
    monkeypatch.chdir(ROOT)
    sweep = _sweep_file.load(str(path))
    cells = _sweep_matrix.expand(sweep)
    factors = 1
    for _, levels in sweep.factors.values:
        factors *= len(levels)
    assert len(cells) == factors * sum(len(sweep.keys_of(arm)) for arm in sweep.arms)
    assert all(arm.claim for arm in sweep.arms)


POST_HOC = """
[[arms]]
name = "post_hoc"
set = ["recipe.name=RECIPE"]
policy_of = "bf16"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_arm_can_evaluate_the_final_policy_of_another(workers, tmp_path, monkeypatch, capsys):
    """As the same recipe publishes it, it is the other arm's own evaluation; in FP4 it is one, too."""
    monkeypatch.chdir(ROOT)
    for name, value in CACHE.items():
        monkeypatch.setenv(name, value)
    few = HEAD.replace("steps=3", 'steps=1", "eval.problems=4", "eval.batch_prompts=4')
    same = POST_HOC.replace("RECIPE", "bf16")
    fp4 = POST_HOC.replace("RECIPE", "naive_nvfp4").replace("post_hoc", "post_hoc_fp4")
    statistics = POST_HOC.replace("RECIPE", "quads").replace("post_hoc", "calibrated")
    words = ["sweep", sweep_file(tmp_path, few + BF16 + same + fp4 + statistics), f"--workers={workers}"]
    assert cli.main(words) == exit_codes.ARM
    assert "the rollout of 'quads' calibrates while it trains" in capsys.readouterr().out
    runs = {run["arm"]: run for run in read_json(tmp_path / "runs" / "sweep.json")["runs"]}
    assert [run["state"] for run in runs.values()] == ["done", "done", "done", "failed"]
    assert runs["post_hoc"]["after"] == runs["bf16"]["after"] and runs["bf16"]["before"] is not None
    assert (
        runs["post_hoc_fp4"]["after"] is not None
        and not (tmp_path / "runs/post_hoc-0/metrics.jsonl").exists()
    )
    assert (runs["post_hoc"]["steps"], runs["post_hoc"]["total"]) == (0, 0)


def test_finished_runs_give_up_their_checkpoints_but_for_policies_that_are_evaluated(tmp_path, monkeypatch):
    """Their results stay what they were, and they are not run again, unless they are to have more steps."""
    text = HEAD + 'keep = "results"\n' + BF16 + NAIVE + POST_HOC.replace("RECIPE", "fp8_rollout")
    text = text.replace("steps=3", 'steps=3", "eval.problems=4')
    trained: list[str] = []

    def train(config, **_):
        path = config.run.path
        trained.append(config.run.name)
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_bytes(dump_json(as_dict(config)))
        lines = [{"step": step, "reward_mean": 0.25} for step in range(config.loop.steps)]
        (path / "metrics.jsonl").write_bytes(dump_lines(lines))
        (path / "evals.jsonl").write_bytes(dump_lines([{"step": config.loop.steps}]))
        Checkpointer(path / "checkpoints").save(config.loop.steps, {"x": np.zeros(3)}, {})
        return exit_codes.OK

    monkeypatch.setattr(_sweep_run, "train", train)
    monkeypatch.setattr(_sweep_run._sweep_policy, "evaluate", lambda *_: exit_codes.OK)

    def swept(text: str) -> list[tuple]:
        cells, root = expand(tmp_path, text), tmp_path / "runs"
        _sweep_run.run_cells(cells, root, seconds=None)
        record = _sweep_record.of_folders(
            _sweep_file.load(str(tmp_path / "sweep.toml")), cells, {}, recorded={}
        )
        return [(run.name, run.state, run.steps, len(run.courses["reward_mean"])) for run in record.runs[:2]]

    assert swept(text) == swept(text) == [("bf16-0", "done", 3, 3), ("naive-7", "done", 3, 3)]
    assert trained == ["bf16-0", "naive-7"]
    kept = [(tmp_path / "runs" / name / "checkpoints").is_dir() for name in trained]
    assert kept == [True, False]  # the first's policy is the third arm's
    assert swept(text.replace("steps=3", "steps=4"))[1] == ("naive-7", "done", 4, 4)
    assert trained[2:] == ["bf16-0", "naive-7"]


@pytest.mark.parametrize(
    "text, message",
    [
        (POST_HOC.replace("RECIPE", "bf16") + BF16, "expected an arm above it that trains with key 0"),
        (BF16 + POST_HOC.replace("RECIPE", "bf16"), "policy_of = 'bf16', and eval.problems = 0"),
        (BF16 + POST_HOC.replace('"bf16"', '"bf61"'), "unknown policy_of 'bf61'"),
    ],
)
def test_a_policy_that_will_not_be_there_is_refused(text, message, tmp_path, capsys):
    assert cli.main(["sweep", sweep_file(tmp_path, HEAD + text)]) == exit_codes.USAGE
    assert message in capsys.readouterr().err
