"""The table of a sweep: spreads, overheads and verdicts against numbers worked by hand; record and page."""

import dataclasses
import math

import numpy as np
import pytest

from fp4rl_jax import cli
from fp4rl_jax.cli import _sweep_record, _sweep_results, _sweep_table
from fp4rl_jax.cli._sweep_file import SweepSection
from fp4rl_jax.cli._sweep_record import RunRecord, SweepRecord
from fp4rl_jax.configuring import build
from fp4rl_jax.runs.report import bands
from fp4rl_jax.runs.report.sections import with_section


def course(*values: float | None) -> list[list[float | None]]:
    return [[step, value] for step, value in enumerate(values)]


def run(arm: str, key: int, *, reward: float, kl: float, seconds: float, **more) -> RunRecord:
    """Four steps: reward 0, 0, r - 0.1, r + 0.1; k3 kl, kl, 3 kl, 9 kl; the first step takes a minute."""
    given = {"state": "done", "steps": 4, "digest": f"{arm}{key}", **more}
    return RunRecord(
        name=f"{arm}-{key}", arm=arm, key=key, factors={}, total=4,
        courses={
            "reward_mean": course(0, 0, reward - 0.1, reward + 0.1),
            "mismatch_kl": course(kl, kl, 3 * kl, 9 * kl),
            "logprob_gap_max": course(1, None, 4, 2),
            "step_seconds": course(60, seconds, seconds, 5 * seconds),
        },
        **given,
    )  # fmt: skip


def record(*runs: RunRecord, expect: tuple[dict, ...] = ()) -> SweepRecord:
    arms = [{"name": "base"}, {"name": "arm", "claim": "a | b", "expect": list(expect)}]
    sweep = {"title": "T", "root": "r", "baseline": "base", "last": 2, "keys": [0, 1, 2], "arms": arms}
    return SweepRecord(sweep=build(SweepSection, sweep), runs=runs)


def three(arm: str, rewards: tuple[float, ...], kl: float = 0.1, seconds: float = 2.0) -> list[RunRecord]:
    return [run(arm, k, reward=r, kl=kl * (1 + k), seconds=seconds + k) for k, r in enumerate(rewards)]


def test_a_spread_is_students_interval_of_the_mean_over_keys():
    """0.5, 0.6, 0.7: deviation 0.1, t(2) = 4.303, half-width 4.303 * 0.1 / sqrt(3) = 0.2484."""
    found = _sweep_table.spread([0.5, 0.6, 0.7])
    assert found is not None and found.half is not None
    assert found.mean == pytest.approx(0.6) and found.half == pytest.approx(0.24843, abs=1e-5)
    alone = _sweep_table.spread([0.5])
    assert alone is not None and alone.half is None and (alone.low, alone.high) == (-math.inf, math.inf)
    assert _sweep_table.spread([]) is None


def test_the_measures_of_a_row_are_those_worked_by_hand():
    made = record(*three("base", (0.5, 0.6, 0.7)), *three("arm", (0.2, 0.2, 0.2), seconds=3.0))
    base, arm = _sweep_table.rows(made)
    values = {}
    for name in ("reward", "mismatch_kl", "mismatch_kl_worst", "logprob_gap_max", "step_seconds"):
        found = _sweep_table.measure(name, base, made)
        assert found is not None
        values[name] = found.mean
    # medians of (k, k, 3k, 9k) are 2k with k = 0.1, 0.2, 0.3; seconds: medians of (s, s, 5s), s = 2, 3, 4
    expected = {"reward": 0.6, "mismatch_kl": 0.4, "mismatch_kl_worst": 1.8, "logprob_gap_max": 4.0}
    assert values == pytest.approx(expected | {"step_seconds": 3.0})
    # 3/2, 4/3 and 5/4 less 1: mean 13/36, deviation 0.12729, half-width 4.303 * 0.12729 / sqrt(3)
    overhead = _sweep_table.measure("overhead", arm, made)
    assert overhead is not None and overhead.mean == pytest.approx(13 / 36)
    assert overhead.half == pytest.approx(0.31624, abs=1e-5)
    assert _sweep_table.measure("overhead", base, made) is None


ABOVE = {"measure": "reward", "relation": "above", "arm": "base"}
BELOW = {**ABOVE, "relation": "below"}


def over(value: float, measure: str = "reward") -> dict:
    return {"measure": measure, "relation": "above", "value": value}


@pytest.mark.parametrize(
    "rewards, expect, word",
    [
        ((0.80, 0.81, 0.82), (ABOVE,), "agrees"),  # [0.785, 0.835] over [0.475, 0.525]
        ((0.80, 0.81, 0.82), (BELOW,), "disagrees"),
        ((0.50, 0.52, 0.54), (ABOVE,), "too small to tell"),  # [0.470, 0.570]
        ((0.80, 0.81, 0.82), (ABOVE, over(0.82)), "too small to tell"),
        ((0.80, 0.81, 0.82), (ABOVE, over(0.9)), "disagrees"),
        ((0.80, 0.81, 0.82), (ABOVE, over(0.9, "pass@1")), "-"),
        ((0.80,), (ABOVE,), "too small to tell"),
        ((0.80, 0.81, 0.82), (), "-"),
    ],
)  # fmt: skip
def test_a_verdict_needs_intervals_that_are_apart(rewards, expect, word):
    made = record(*three("base", (0.49, 0.50, 0.51)), *three("arm", rewards), expect=expect)
    assert _sweep_table.verdict(_sweep_table.rows(made)[1], made) == word


def test_nothing_is_said_of_an_arm_before_all_its_keys_are_through():
    arms = three("arm", (0.80, 0.81, 0.82))
    left = run("arm", 2, reward=0.82, kl=0.1, seconds=1, state="partial", steps=2)
    made = record(*three("base", (0.49, 0.50, 0.51)), *arms[:2], left, expect=(ABOVE,))
    assert _sweep_table.verdict(_sweep_table.rows(made)[1], made) == "-"
    assert "| 2/3; key 2: partial, 2 of 4 steps |" in _sweep_table.markdown(made)


def test_seconds_of_runs_that_shared_a_device_are_neither_shown_nor_judged(tmp_path):
    """Their other columns are; the arm's overhead rests on the baseline's seconds, too."""
    faster = {"measure": "overhead", "relation": "below", "value": 0.5}
    base, arm = three("base", (0.49, 0.50, 0.51)), three("arm", (0.80, 0.81, 0.82), seconds=3.0)
    shared = [dataclasses.replace(arm[0], shared=4), *arm[1:]]

    def shown(*runs: RunRecord, expect: tuple[dict, ...]) -> tuple[list[str], str, str]:
        made = record(*runs, expect=expect)
        text = _sweep_table.markdown(made)
        cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
        verdict = _sweep_table.verdict(_sweep_table.rows(made)[1], made)
        return [*cells[0][8:10], *cells[1][8:10]], verdict, text.rpartition("|\n")[2]

    alone = ["3 ± 2.48", "-", "4 ± 2.48", "+36.1% ± 31.6%"]
    assert shown(*base, *arm, expect=(faster,)) == (alone, "too small to tell", "")
    word, note = "too small to tell: runs not alone on one device", "\n" + _sweep_table.UNTIMED_NOTE + "\n"
    assert shown(*base, *shared, expect=(faster,)) == ([*alone[:2], "-", "-"], word, note)
    assert shown(*base, *shared, expect=(ABOVE, faster))[1] == word
    assert shown(*base, *shared, expect=(BELOW, faster))[1] == "disagrees"
    assert shown(*base, *shared, expect=(ABOVE,))[1] == "agrees"
    theirs = [dataclasses.replace(base[0], shared=4), *base[1:]]
    assert shown(*theirs, *arm, expect=(faster,)) == (["-", "-", alone[2], "-"], word, note)
    slower = {"measure": "step_seconds", "relation": "above", "arm": "base"}
    assert shown(*theirs, *arm, expect=(slower,))[1] == word
    other = [dataclasses.replace(run, made={"device": "1 x other"}) for run in base]
    assert shown(*other, *arm, expect=(faster,)) == ([*alone[:3], "-"], word, note)


def test_the_sentence_on_seconds_is_written_once_into_a_page(tmp_path):
    page = tmp_path / "PAGE.md"
    page.write_text("# Page\n")
    shared = record(run("base", 0, reward=0.5, kl=0.1, seconds=2, shared=2), *three("arm", (0.8,)))
    alone = record(*three("base", (0.5,)), *three("arm", (0.8,)))
    for made, count in ((shared, 1), (shared, 1), (alone, 0), (shared, 1)):
        _sweep_results.write_page(made, page, name="x")
        text = page.read_text()
        assert text.count(_sweep_table.UNTIMED_NOTE) == count
        assert text == "# Page\n\n" + _sweep_results.section(made, "img/x.png")
    page.write_text(page.read_text() + "\nread out of it\n")
    _sweep_results.write_page(alone, page, name="x")
    assert (
        page.read_text() == "# Page\n\n" + _sweep_results.section(alone, "img/x.png") + "\nread out of it\n"
    )


def test_the_markdown_names_failures_and_escapes_what_would_break_it():
    failed = run(
        "arm", 0, reward=0, kl=0, seconds=1, state="failed", steps=1, message="exit code 6: x\ny | z"
    )
    made = record(run("base", 0, reward=0.5, kl=0.1, seconds=2, after=[0.25, 0.2, 0.3]), failed)
    lines = _sweep_table.markdown(made).splitlines()
    assert lines[0] == "- `arm-0` failed, step 1 of 4: exit code 6: x y | z"
    assert lines[4] == "| `base` | 1/1 | 0.500 | - | 0.250 [0.20, 0.30] | 0.2 | 0.9 | 4 | 2 | - | - | - |"
    assert lines[5].endswith("| - | a \\| b | - |") and "key 0: failed, 1 of 4 steps" in lines[5]


def test_a_record_makes_the_same_table_and_a_section_of_a_page(tmp_path, capsys):
    made = record(*three("base", (0.5, 0.6, 0.7)), *three("arm", (0.2, 0.2, 0.2)), expect=(ABOVE,))
    file, page = tmp_path / "kept.json", tmp_path / "PAGE.md"
    file.write_bytes(_sweep_record.dump(made))
    assert _sweep_record.parse(file) == made
    page.write_text("# Page\n\n## T two\n\nkept\n")
    for _ in range(2):  # the second call replaces what the first wrote
        assert cli.main(["sweep", str(file), f"--page={page}"]) == 0
    assert capsys.readouterr().out == 2 * _sweep_table.markdown(made)
    text = page.read_text()
    assert text == "# Page\n\n## T two\n\nkept\n\n" + _sweep_results.section(made, "img/kept.png")
    assert (tmp_path / "img" / "kept.png").stat().st_size > 10_000


def test_a_file_that_is_no_record_is_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    assert cli.main(["sweep", str(tmp_path / "x.json")]) == 3
    assert "x.json is no record of a sweep: expected the keys" in capsys.readouterr().err


def test_a_page_that_is_not_there_is_refused(tmp_path, capsys):
    assert cli.main(["sweep", "x.toml", f"--page={tmp_path / 'none.md'}"]) == 2
    assert "none.md: no such file" in capsys.readouterr().err


def test_a_band_is_the_mean_and_range_of_the_keys_that_have_the_step():
    found = bands.band("a", [course(1, 2, None), course(3, None, None), course(5)])
    assert found.steps.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found.mean, [3, 2, np.nan])
    np.testing.assert_array_equal(found.low, [1, 2, np.nan])
    np.testing.assert_array_equal(found.high, [5, 2, np.nan])


def test_a_section_is_replaced_and_what_stands_below_its_table_is_kept():
    old = "# P\n\n### A b\n\n## A\n\nold\n\n| x |\n| --- |\n| 1 |\n\nread out of it\n\n## B\n\nb\n"
    new = with_section(old, "## A", "## A\n\n| y |\n| --- |\n")
    assert new == "# P\n\n### A b\n\n## A\n\n| y |\n| --- |\n\nread out of it\n\n## B\n\nb\n"
    assert with_section("# P\n", "## A", "s\n") == "# P\n\ns\n"
    with pytest.raises(ValueError, match="section '## B' is there and has no table"):
        with_section(old, "## B", "")
