"""The numbers of a report: one row a quantity, one cell a run."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fp4rl_jax.runs.report.data import RunData
from fp4rl_jax.runs.report.evals import EvalPoint, before_after, difference, pass_points
from fp4rl_jax.runs.report.panels import PANELS, panel_series

ABSENT = "–"


@dataclass(frozen=True)
class Row:
    """One line of the table of final numbers."""

    name: str
    cells: tuple[str, ...]


def rows(runs: list[RunData]) -> list[Row]:
    """The table of final numbers; a quantity that no run has is left out."""
    table = [Row("steps done", tuple(str(len(run.metrics)) for run in runs))]
    metric = next((points[0].metric for points in map(pass_points, runs) if points), "")
    for name, cell in _QUANTITIES:
        cells = tuple(cell(run) for run in runs)
        if any(text != ABSENT for text in cells):
            table.append(Row(name.format(metric=metric), cells))
    return table


def text_table(runs: list[RunData]) -> str:
    """The table for a terminal."""
    head = Row("", tuple(run.label for run in runs))
    table = [head, *rows(runs)]
    widths = [max(len(row.cells[i]) for row in table) for i in range(len(runs))]
    first = max(len(row.name) for row in table)
    return "\n".join(
        f"{row.name:<{first}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(row.cells, widths, strict=True))
        for row in table
    )


def interval(point: EvalPoint) -> str:
    """A share in percent with its 95 % interval, e.g. `41.0 % [32.1, 50.5]`."""
    return f"{100 * point.value:.1f} % [{100 * point.low:.1f}, {100 * point.high:.1f}]"


def gain(point: EvalPoint) -> str:
    """A difference of shares in points with its 95 % interval, e.g. `+9.0 points [+1.5, +16.2]`."""
    return f"{100 * point.value:+.1f} points [{100 * point.low:+.1f}, {100 * point.high:+.1f}]"


def _evaluated(which: str) -> Callable[[RunData], str]:
    def cell(run: RunData) -> str:
        pair = before_after(run)
        if pair is None:
            return ABSENT
        if which == "difference":
            point = difference(run)
            return ABSENT if point is None else gain(point)
        return interval(pair[0] if which == "before" else pair[1])

    return cell


def _statistic(panel_name: str, how: Callable[[np.ndarray], float]) -> Callable[[RunData], str]:
    panel = next(panel for panel in PANELS if panel.name == panel_name)

    def cell(run: RunData) -> str:
        values = panel_series(run, panel)[1]
        values = values[np.isfinite(values)]
        if not values.size:
            return ABSENT
        number = how(values)
        return f"{100 * number:.2f} %" if panel.scale == "share" else f"{number:.4g}"

    return cell


def _sum_of(key: str) -> Callable[[RunData], str]:
    def cell(run: RunData) -> str:
        values = run.series(key)[1]
        return f"{np.nansum(values):.4g}" if np.isfinite(values).any() else ABSENT

    return cell


def _median_of(key: str) -> Callable[[RunData], str]:
    def cell(run: RunData) -> str:
        values = run.series(key)[1]
        return f"{np.nanmedian(values):.4g}" if np.isfinite(values).any() else ABSENT

    return cell


def _head(values: np.ndarray) -> float:
    return float(values[: max(1, min(5, len(values) // 2))].mean())


def _tail(values: np.ndarray) -> float:
    return float(values[-max(1, min(5, len(values) // 2)) :].mean())


def _last(values: np.ndarray) -> float:
    return float(values[-1])


_QUANTITIES = (
    ("{metric} before (95 % interval)", _evaluated("before")),
    ("{metric} after (95 % interval)", _evaluated("after")),
    ("{metric} gain (95 % interval)", _evaluated("difference")),
    ("reward, first steps", _statistic("reward", _head)),
    ("reward, last steps", _statistic("reward", _tail)),
    ("mismatch KL, median (nats/token)", _statistic("mismatch", lambda x: float(np.median(x)))),
    ("mismatch KL, worst (nats/token)", _statistic("mismatch", lambda x: float(x.max()))),
    ("largest log-prob gap (nats)", _statistic("logprob_gap", lambda x: float(x.max()))),
    ("tokens moved by > 0.01 nats, median", _statistic("moved", lambda x: float(np.median(x)))),
    ("activation underflow in the rollout, last", _statistic("underflow_rollout", _last)),
    ("activation underflow in the trainer, last", _statistic("underflow_trainer", _last)),
    ("weight underflow, last", _statistic("underflow_weights", _last)),
    ("entropy, last (nats/token)", _statistic("entropy", _last)),
    ("completion length, last (tokens)", _statistic("length", _last)),
    ("gradient norm, median", _statistic("grad_norm", lambda x: float(np.median(x)))),
    ("updates skipped", _sum_of("updates_skipped")),
    ("seconds a step, median", _median_of("step_seconds")),
    ("rollout tokens/s, median", _statistic("throughput", lambda x: float(np.median(x)))),
)
