"""Reports: what is drawn, what is left out and said so, the numbers of the table, one closed page."""

import base64
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from fp4rl_jax import cli, runs
from fp4rl_jax.cli import report as command
from fp4rl_jax.runs import report
from fp4rl_jax.runs.report import data, evals, panels, plots, summary


def make_run(
    root: Path, name: str, *, steps: int = 6, without: str = "", passed: tuple[float, float] | None = None
):
    """A run of made-up numbers: reward step / 10, mismatch 10^-step, two sites' weight underflow."""
    config = runs.RunConfig(root=str(root), name=name, tensorboard="off")
    resolved = {"recipe": {"name": name}, "loop": {"steps": steps}}
    with runs.RunDirectory.open(config, resolved=resolved) as run:
        run.start(0)
        run.write_manifest(runs.build_manifest(seed=0, implementations={}, numerics={}))
        for step in range(steps):
            values = {
                "reward_mean": step / 10,
                "mismatch_kl": 10.0**-step,
                "logprob_gap_max": 0.0,
                "moved_share": 0.0,
                "quant/weights/attn/qkv/underflow": 0.1,
                "quant/weights/mlp/down/underflow": 0.3,
                "quant/rollout/mlp/down/underflow": 0.5,
                "quant/trainer/mlp/down/underflow": 0.6,
                "entropy": 1.0,
                "completion_length_mean": 8.0,
                "grad_norm": math.nan if step == 2 else 1.0,
                "tokens_per_second": 100.0,
            }
            run.metrics.write(step, {key: value for key, value in values.items() if key != without})
            run.write_transcripts(step, [{"prompt": "1 < 2?", "completion": "<b>yes</b>", "reward": 1.0}])
        for label, at, value in zip(("before", "after"), (0, steps), passed or (), strict=False):
            interval = {"low": value - 0.1, "high": value + 0.1, "count": 100}
            run.write_eval(at, label, {"metric": "pass@1", "value": value, **interval})
    return root / name


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the pictures out where a test is about something else."""

    def folder_only(_, folder: Path) -> dict[str, Path]:
        folder.mkdir(parents=True, exist_ok=True)
        return {}

    monkeypatch.setattr(plots, "draw", folder_only)


def test_every_panel_of_a_full_run_is_drawn_into_one_closed_page(tmp_path):
    done = report.build([make_run(tmp_path, "a", passed=(0.3, 0.7))])
    assert list(done.pictures) == ["pass", *(panel.name for panel in panels.PANELS), "overview"]
    assert done.page == tmp_path / "a/report/report.html"
    text = done.page.read_text()
    embedded = [base64.b64decode(part) for part in re.findall(r"data:image/png;base64,([^\"]+)", text)]
    assert embedded == [path.read_bytes() for name, path in done.pictures.items() if name != "overview"]
    assert not re.search(r"(src|href)=\"(?!data:)", text) and "<script" not in text
    assert "&lt;b&gt;yes&lt;/b&gt;" in text and "1 &lt; 2?" in text and "<b>yes" not in text
    assert done.notes == ("Gradient norm: not finite in a at step 2",)


def test_equal_runs_give_equal_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "PANELS", panels.PANELS[1:2])
    loaded = data.load([make_run(tmp_path, "a")])
    first, second = (plots.draw(loaded, tmp_path / out) for out in ("x", "y"))
    assert list(first) == ["mismatch", "overview"]
    for name, file in first.items():
        assert file.read_bytes() == second[name].read_bytes()


def test_a_picture_holds_the_values(tmp_path):
    """Through matplotlib's own objects: the line of each run, zeros at the floor, a gap at a NaN."""
    loaded = data.load([make_run(tmp_path, "a")])
    axes = plots.matplotlib_figure()().add_subplot()
    by_name = {panel.name: panel for panel in panels.PANELS}
    plots._draw_panel(axes, loaded, by_name["grad_norm"], legend=True)
    (line,) = axes.get_lines()
    assert np.isnan(line.get_ydata()).tolist() == [False, False, True, False, False, False]
    assert axes.get_yscale() == "log" and axes.get_ylabel() == "global norm before clipping"
    axes = plots.matplotlib_figure()().add_subplot()
    plots._draw_panel(axes, loaded, by_name["logprob_gap"], legend=True)
    low, high = axes.get_ylim()
    assert (
        axes.get_yscale() == "log" and low == panels.ROUNDING_GAP / 10 and high >= 1e4 * panels.ROUNDING_GAP
    )


def test_gaps_of_float_rounding_are_one_level_in_a_band_that_says_so(tmp_path):
    """mismatch_kl 1, 1e-1 ... 1e-11 and then rounding noise: the noise is a flat line in the grey band."""
    loaded = data.load([make_run(tmp_path, "a", steps=16)])
    panel = next(panel for panel in panels.PANELS if panel.name == "mismatch")
    axes = plots.matplotlib_figure()().add_subplot()
    plots._draw_panel(axes, loaded, panel, legend=True)
    drawn = np.asarray(axes.get_lines()[0].get_ydata())
    assert drawn[:11].tolist() == [10.0**-step for step in range(11)]
    assert panel.rounding is not None and set(drawn[11:]) == {plots.in_band(panel.rounding)}
    assert panel.rounding / 10 < plots.in_band(panel.rounding) < panel.rounding
    assert [text.get_text() for text in axes.texts] == ["below 5e-11: the sides agree to float32 rounding"]


@pytest.mark.parametrize("share", [0.0, 0.137])
def test_a_flat_share_lies_inside_its_picture(share):
    from matplotlib.figure import Figure

    panel = next(panel for panel in panels.PANELS if panel.scale == "share")
    series = [{"step": step, panel.key.replace("*", "mlp/down"): share} for step in range(3)]
    axes = Figure().subplots()
    plots._draw_panel(axes, [data.RunData(path=Path("a"), label="a", metrics=series)], panel, legend=False)
    (line,) = axes.lines
    low, high = axes.get_ylim()
    assert low < 0 <= share < high - share / 50 and np.all(line.get_ydata() == share)


def test_the_shape_that_a_checkpoint_replaces_is_not_shown(tmp_path, undrawn):
    """`model.shape` makes a random model only where `model.path` names none."""
    run = make_run(tmp_path, "a")
    for path, shown in ((None, True), ("models/smollm2", False)):
        config = {"model": {"path": path, "shape": {"num_layers": 977}}}
        (run / "config.json").write_text(json.dumps(config))
        text = report.build([run]).page.read_text()
        assert ("977" in text) == shown and ("models/smollm2" in text) != shown


def test_several_runs_are_overlaid_and_their_differences_listed(tmp_path, monkeypatch):
    paths = [make_run(tmp_path, "bf16", without="entropy"), make_run(tmp_path, "qat", steps=4)]
    monkeypatch.setattr(plots, "PANELS", panels.PANELS[:1])
    done = report.build(paths)
    assert list(done.pictures) == ["reward", "overview"]
    assert done.page.parent == tmp_path / "report-bf16-qat"
    assert "Policy entropy: entropy is absent in bf16" in done.notes
    text = done.page.read_text()
    assert "<code>recipe.name</code>" in text and "<code>loop.steps</code>" in text
    assert "<code>run.name</code>" not in text


def test_a_metric_that_no_run_has_is_left_out_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "PANELS", [panel for panel in panels.PANELS if panel.name == "entropy"])
    loaded = data.load([make_run(tmp_path, "a", without="entropy")])
    assert plots.draw(loaded, tmp_path / "out") == {}
    assert panels.missing(loaded) == ["Policy entropy: entropy is absent in every run"]


def test_underflow_is_the_mean_over_sites_of_one_operand_of_one_side(tmp_path):
    (run,) = data.load([make_run(tmp_path, "a")])
    by_name = {panel.name: panel for panel in panels.PANELS}
    for what, expected in {"weights": 0.2, "rollout": 0.5, "trainer": 0.6}.items():
        steps, values = panels.panel_series(run, by_name[f"underflow_{what}"])
        assert steps.tolist() == list(range(6)) and np.allclose(values, expected, rtol=1e-15), what


def test_the_table_holds_the_numbers(tmp_path):
    (run,) = data.load([make_run(tmp_path, "a", passed=(0.3, 0.7))])
    cells = {row.name: row.cells[0] for row in summary.rows([run])}
    assert cells["steps done"] == "6"
    assert cells["reward, first steps"] == "0.1" and cells["reward, last steps"] == "0.4"
    assert cells["mismatch KL, worst (nats/token)"] == "1"
    assert cells["weight underflow, last"] == "20.00 %"
    assert cells["activation underflow in the rollout, last"] == "50.00 %"
    assert cells["pass@1 before (95 % interval)"] == "30.0 % [20.0, 40.0]"
    assert cells["pass@1 gain (95 % interval)"] == "+40.0 points [+25.9, +54.1]"  # 0.4 +- hypot(0.1, 0.1)


def test_a_paired_difference_wins_over_the_independent_one(tmp_path):
    path = make_run(tmp_path, "a", passed=(0.3, 0.7))
    with open(path / "evals.jsonl", "a") as file:
        record = {"step": 6, "name": "difference", "metric": "pass@1", "value": 0.4, "low": 0.3, "high": 0.5}
        file.write(json.dumps(record) + "\n")
    (run,) = data.load([path])
    found = evals.difference(run)
    assert found is not None and (found.low, found.high) == (0.3, 0.5)
    assert [point.name for point in evals.pass_points(run)] == ["before", "after"]


def test_newcombes_interval_of_a_published_example():
    """Newcombe 1998, table II, case (a), method 10: 56/70 against 48/80 gives 0.0524 to 0.3339."""

    def wilson(passed: int, count: int) -> tuple[float, float]:
        z, p = 1.959964, passed / count
        middle, half = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count**2))
        return (middle - half) / (1 + z * z / count), (middle + half) / (1 + z * z / count)

    records = []
    for step, (passed, count) in enumerate(((48, 80), (56, 70))):
        low, high = wilson(passed, count)
        record = {"step": step, "name": str(step), "metric": "pass@1", "value": passed / count}
        records.append({**record, "low": low, "high": high, "count": count})
    found = evals.difference(data.RunData("a", Path("a"), evals=records))
    assert found is not None
    assert (round(found.low, 4), round(found.high, 4)) == (0.0524, 0.3339)


def test_the_running_mean_and_the_floor_of_a_log_axis():
    assert plots.smooth(np.array([1.0, 2.0, np.nan, 4.0]), 3).tolist() == [1.5, 1.5, 3.0, 4.0]
    assert plots.log_floor([np.array([0.0, 0.02]), np.array([3.0])]) == 0.002
    assert plots.log_floor([np.zeros(3)]) is None


def test_a_run_without_steps_is_said_so(tmp_path, capsys, undrawn):
    empty = make_run(tmp_path, "empty", steps=0)
    assert cli.main(["report", str(empty)]) == 3
    assert capsys.readouterr().err == (
        f"fp4rl report: nothing to report: no step is done yet (0 lines of metrics) in {empty}\n"
    )
    done = report.build([make_run(tmp_path, "a"), empty])
    assert done.notes[0] == "empty has no step yet"


def test_the_command_prints_table_and_path(tmp_path, capsys, undrawn):
    path = make_run(tmp_path, "a")
    assert command.main([str(path), f"--output={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(" ") and out.endswith(f"\n{tmp_path}/out/report.html\n")
    assert command.main([]) == 2 and cli.main(["report", str(tmp_path / "none")]) == 3
    assert "name at least one run's folder" in capsys.readouterr().err


def test_a_missing_plotting_package_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert cli.main(["report", str(make_run(tmp_path, "a"))]) == 3
    assert (
        "a report needs matplotlib: install the extra with pip install 'fp4rl_jax[run]'"
        in capsys.readouterr().err
    )


def test_a_damaged_line_is_named_and_a_half_written_last_one_is_not(tmp_path):
    path = make_run(tmp_path, "a")
    with open(path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 6, "rew')
    assert len(data.load([path])[0].metrics) == 6
    text = (path / "metrics.jsonl").read_text().replace('{"step": 3', '{"step" 3')
    (path / "metrics.jsonl").write_text(text)
    with pytest.raises(runs.RecordError, match="metrics.jsonl, line 4 is not JSON"):
        report.build([path])
