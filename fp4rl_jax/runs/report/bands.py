"""A picture of several arms: each the mean over its keys, with the range of the keys as a band."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp4rl_jax.runs.errors import storage_errors
from fp4rl_jax.runs.report import plots
from fp4rl_jax.runs.report.panels import Panel


@dataclass(frozen=True)
class Band:
    """One arm in one panel.

    Attributes:
        label: the arm; equal labels have one style in all panels.
        steps: [S] int64.
        mean, low, high: [S] float64 over the keys that have the step; NaN where none is finite.
    """

    label: str
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def band(label: str, courses: Sequence[Sequence[Sequence[float | None]]]) -> Band:
    """Mean and range over keys, step by step.

    Args:
        label: of the arm.
        courses: a key each, [step, value or None] pairs.
    """
    by_step: dict[int, list[float]] = {}
    for course in courses:
        for step, value in course:
            assert step is not None
            by_step.setdefault(int(step), []).extend([] if value is None else [value])
    steps = sorted(by_step)
    over = {np.mean: [], np.min: [], np.max: []}
    for step in steps:
        for how, values in over.items():
            values.append(how(by_step[step]) if by_step[step] else np.nan)
    mean, low, high = (np.array(values, np.float64) for values in over.values())
    return Band(label, np.array(steps, np.int64), mean, low, high)


def draw(
    panels: Sequence[Panel],
    columns: Sequence[tuple[str, Sequence[Sequence[Band]]]],
    *,
    title: str,
    path: Path,
) -> Path:
    """Writes a PNG: a row a panel, a column a choice of factors.

    Args:
        panels: what the rows show.
        columns: (heading, bands of every panel).
        title: over all of it.
        path: of the file.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: the disk refused.
    """
    labels = list(dict.fromkeys(band.label for _, rows in columns for bands in rows for band in bands))
    size = (max(5.4 * len(columns), 6.4), 3.2 * len(panels) + 0.35 * (2 + len(labels) / 6))
    figure = plots.matplotlib_figure()(figsize=size, dpi=130, layout="constrained", facecolor="white")
    grid = figure.subplots(len(panels), len(columns), squeeze=False, sharey="row")
    for column, (heading, rows) in enumerate(columns):
        for row, (panel, bands) in enumerate(zip(panels, rows, strict=True)):
            _panel(grid[row][column], panel, bands, labels)
            if heading and row == 0:
                grid[row][column].set_title(heading, loc="right", fontsize=9)
    for row, panel in enumerate(panels):  # the axes of a row share their scale, so all are dressed before
        for axes in grid[row]:
            _scale(axes, panel)
    handles = [plots.proxy(index, label) for index, label in enumerate(labels)]
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(labels), 6), frameon=False, fontsize=8
    )
    with storage_errors(path, doing="write the picture"):
        return plots.save(figure, path)


def _panel(axes: Any, panel: Panel, bands: Sequence[Band], labels: Sequence[str]) -> None:
    least = plots.least(panel, [band.low for band in bands])
    for band in bands:
        if not np.isfinite(band.mean).any():
            continue
        colour, dash = plots.style_of(labels.index(band.label))
        mean, low, high = (_shown(panel, values, least) for values in (band.mean, band.low, band.high))
        axes.fill_between(band.steps, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(band.steps, mean, dash, color=colour, linewidth=1.6)
    plots.dress(axes, panel.title, panel.unit)


def _scale(axes: Any, panel: Panel) -> None:
    if panel.rounding is not None:
        plots.rounding_band(axes, panel.rounding)
    if panel.scale == "log":
        plots.log_axis(axes)


def _shown(panel: Panel, values: np.ndarray, least: float | None) -> np.ndarray:
    """As it is drawn: running means of long courses, and what a log axis cannot hold at its bottom."""
    if len(values) >= plots.SMOOTH_FROM:
        values = plots.smooth(values, max(5, len(values) // 20))
    if panel.rounding is not None:
        return np.where(values < panel.rounding, plots.in_band(panel.rounding), values)
    return values if least is None else np.where(values <= 0, least, values)
