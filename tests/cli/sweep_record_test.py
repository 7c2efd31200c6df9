"""A record as the next call's `--into`: what it satisfies, what it cannot, and which one is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from fp4rl_jax import cli
from fp4rl_jax.cli import _sweep_file, _sweep_matrix, _sweep_record, _sweep_run
from fp4rl_jax.cli._sweep_file import COURSES
from fp4rl_jax.cli._sweep_matrix import Cell
from fp4rl_jax.cli._sweep_record import RunRecord, SweepRecord
from fp4rl_jax.runs import exit_codes

HEAD = f"""
title = "Test"
root = "ROOT"
config = ["{Path(__file__).parents[2] / "configs" / "ci" / "grpo.toml"}"]
set = ["run.progress=off", "loop.steps=3", "eval.problems=4"]
keys = [0, 1]

[[arms]]
name = "bf16"
set = ["recipe.name=bf16"]

[[arms]]
name = "after"
set = ["recipe.name=naive_nvfp4"]
policy_of = "bf16"
"""


def cells_of(tmp_path: Path, text: str = HEAD) -> tuple[Cell, ...]:
    file = tmp_path / "sweep.toml"
    file.write_text(text.replace("ROOT", str(tmp_path / "runs")))
    return _sweep_matrix.expand(_sweep_file.load(str(file)))


def done(cell: Cell, **more) -> RunRecord:
    given = {"state": "done", "steps": cell.steps, "digest": cell.digest, "shared": 9, **more}
    made = {"date": "2026-12-01", "device": "1 x elsewhere", "jax": "1"}
    courses = {key: [[step, 0.5] for step in range(cell.steps)] for key in COURSES}
    return RunRecord(
        name=cell.name, arm=cell.group.arm, key=cell.key, factors=dict(cell.group.factors), total=cell.steps,
        courses=courses, made=made, **given,
    )  # fmt: skip


def written(tmp_path: Path, *runs: RunRecord) -> Path:
    """A record of these runs, in a folder that is not the sweep's root."""
    file = tmp_path / "earlier.json"
    sweep = _sweep_file.load(str(tmp_path / "sweep.toml"))
    file.write_bytes(_sweep_record.dump(SweepRecord(sweep=sweep, runs=runs)))
    return file


def test_a_digest_counts_what_makes_another_run(tmp_path):
    first, second, policy, _ = cells_of(tmp_path)
    assert len({first.digest, second.digest, policy.digest}) == 3
    elsewhere = ("/tmp/x", "run.keep_last=5", "run.progress=lines", "mesh.data=2")
    same = HEAD.replace("ROOT", elsewhere[0])
    for word in elsewhere[1:]:
        same = same.replace("run.progress=off", f'run.progress=off", "{word}')
    assert [cell.digest for cell in cells_of(tmp_path, same)][::2] == [first.digest, policy.digest]
    for old, new in (("steps=3", "steps=4"), ("problems=4", "problems=5"), ("keys = [0", "keys = [2")):
        changed = cells_of(tmp_path, HEAD.replace(old, new))
        assert changed[0].digest != first.digest and changed[2].digest != policy.digest
    other_policy = cells_of(tmp_path, HEAD.replace('"recipe.name=bf16"', '"recipe.name=fp8_rollout"'))
    assert other_policy[2].digest != policy.digest  # its own configuration is the same


def test_a_record_satisfies_a_run_of_the_same_configuration_whatever_its_arm_is_called(tmp_path):
    cells = cells_of(tmp_path)
    first, second, policy, _ = cells
    sweep = _sweep_file.load(str(tmp_path / "sweep.toml"))
    runs = (
        dataclasses.replace(done(first), name="yardstick-0", arm="yardstick", factors={"engine_gap": "none"}),
        done(second, digest="0" * 64),
        done(policy, state="partial"),
    )
    earlier = SweepRecord(sweep=sweep, runs=runs)
    assert _sweep_record.finished_in(earlier, sweep, cells) == {"bf16-0": done(first)}


def test_a_key_that_has_come_since_counts_where_it_is_set(tmp_path):
    """As if the record were older than `triage.gate.microbatches`: at its default it makes no other run."""
    text = HEAD.replace(
        '"recipe.name=bf16"', '"recipe.name=quads"'
    )  # the policy's source has keys of its own
    cells = cells_of(tmp_path, text)
    every = frozenset(key for cell in cells for key in cell.settings)
    assert [cell.digest_among(every) for cell in cells] == [cell.digest for cell in cells]
    before = every - {"triage.gate.microbatches"}
    runs = [done(cell, digest=cell.digest_among(before)) for cell in cells]
    assert all(run.digest != cell.digest for run, cell in zip(runs, cells, strict=True))
    sweep = _sweep_file.load(str(tmp_path / "sweep.toml"))
    earlier = SweepRecord(sweep=sweep, runs=tuple(runs), keys=tuple(before))
    found = _sweep_record.finished_in(earlier, sweep, cells)
    assert found == {cell.name: done(cell) for cell in cells}  # under the digests of today
    whole = dataclasses.replace(earlier, keys=())
    assert not _sweep_record.finished_in(whole, sweep, cells)
    word = "triage.gate.microbatches=score_twice"
    other = cells_of(tmp_path, text.replace("run.progress=off", f'run.progress=off", "{word}'))
    assert not _sweep_record.finished_in(earlier, sweep, other)


def test_a_record_without_a_course_that_the_sweep_shows_satisfies_nothing(tmp_path):
    cells = cells_of(tmp_path)
    sweep = _sweep_file.load(str(tmp_path / "sweep.toml"))
    earlier = SweepRecord(sweep=sweep, runs=tuple(map(done, cells)))
    assert len(_sweep_record.finished_in(earlier, sweep, cells)) == 4
    for field in ("draw", "columns", "record"):
        wanting = dataclasses.replace(sweep, **{field: ("reward_mean", "entropy")})
        assert _sweep_record.finished_in(earlier, wanting, cells) == {}


def started(monkeypatch) -> list[str]:
    """The runs that a call trains or evaluates; nothing is run."""
    names = []
    monkeypatch.setattr(_sweep_run, "_run", lambda cell, *_: names.append(cell.name) or exit_codes.OK)
    return names


def test_what_an_earlier_record_has_finished_is_kept_and_not_run(tmp_path, monkeypatch, capsys):
    cells = cells_of(tmp_path)
    into = written(tmp_path, *(done(cells[number]) for number in (0, 2)))
    words = ["sweep", str(tmp_path / "sweep.toml"), f"--into={into}"]
    assert cli.main([*words, "--dry_run"]) == exit_codes.OK
    said = capsys.readouterr()
    assert f"{into}: 2 of its 2 finished runs are kept" in said.err
    lines = [line.split() for line in said.out.splitlines()[1:]]
    assert [(line[0], line[1]) for line in lines] == [
        ("bf16-0", "recorded"), ("bf16-1", "to"), ("after-0", "recorded"), ("after-1", "to"),
    ]  # fmt: skip

    names = started(monkeypatch)
    assert cli.main(words) == exit_codes.OK
    assert names == ["bf16-1", "after-1"]
    made = _sweep_record.parse(tmp_path / "runs" / "sweep.json")
    assert [run.state for run in made.runs] == ["done", "to do", "done", "to do"]
    assert made.runs[0] == done(cells[0]) and made.runs[1].digest == cells[1].digest
    assert "date 2026-12-01, device 1 x elsewhere, jax 1." in (tmp_path / "runs" / "sweep.md").read_text()
    assert cli.main([words[0], words[1], f"--into={tmp_path / 'runs' / 'sweep.json'}"]) == exit_codes.OK
    assert _sweep_record.parse(tmp_path / "runs" / "sweep.json") == made


def test_several_records_are_taken_together(tmp_path, monkeypatch, capsys):
    cells = cells_of(tmp_path)
    files = []
    for number in (0, 1):
        files.append(written(tmp_path, done(cells[number])).rename(tmp_path / f"{number}.json"))
    names = started(monkeypatch)
    words = [f"--into={file}" for file in files]
    assert cli.main(["sweep", str(tmp_path / "sweep.toml"), "--failed=again", *words]) == exit_codes.ARM
    assert names == []  # the other two are of policies that lie elsewhere
    said = capsys.readouterr().err
    assert all(f"{file}: 1 of its 1 finished runs are kept" in said for file in files)


def test_a_policy_that_is_in_the_earlier_record_alone_is_refused_by_name(tmp_path, monkeypatch, capsys):
    cells = cells_of(tmp_path)
    into = written(tmp_path, done(cells[0]))
    names = started(monkeypatch)
    assert cli.main(["sweep", str(tmp_path / "sweep.toml"), f"--into={into}"]) == exit_codes.ARM
    assert names == ["bf16-1", "after-1"]
    line = "- `after-0` failed, step 0 of 0: exit code 3: bf16-0 is finished in the earlier record alone"
    assert line in capsys.readouterr().out
    assert json.loads((tmp_path / "runs" / "failures.json").read_text()) == {}  # tried again where it is


def test_a_record_is_small_and_a_run_a_line(tmp_path):
    cells = cells_of(tmp_path)
    file = written(tmp_path, *map(done, cells))
    lines = file.read_text().splitlines()
    assert len(lines) == 5 + len(cells) + 2
    assert [json.loads(line.rstrip(","))["name"] for line in lines[5:-2]] == [cell.name for cell in cells]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": None}, "is a sweep's record of format 1, expected 2, which has the digests"),
        ({"format": 3}, "is a sweep's record of format 3, expected 2"),
        ({"runs": None}, "is no record of a sweep: expected the keys format, sweep and runs"),
    ],
)
def test_a_record_that_does_not_say_what_its_runs_were_is_refused(change, message, tmp_path, capsys):
    cells = cells_of(tmp_path)
    file = written(tmp_path, done(cells[0]))
    plain = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in plain.items() if value is not None}))
    for words in ([str(tmp_path / "sweep.toml"), f"--into={file}"], [str(file)]):
        assert cli.main(["sweep", *words]) == exit_codes.RUN
        line = capsys.readouterr().err
        assert f"{file} {message}" in line and line.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_nothing_is_run_of_a_record_alone(tmp_path, capsys):
    cells_of(tmp_path)
    file = written(tmp_path)
    assert cli.main(["sweep", str(file), f"--into={file}"]) == exit_codes.USAGE
    assert (
        "is a record, of which nothing is run: expected a sweep file with --into" in capsys.readouterr().err
    )
