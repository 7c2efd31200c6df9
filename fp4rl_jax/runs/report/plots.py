"""The pictures of a report: one look for all, no global plotting state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fp4rl_jax.runs.errors import missing_extra, storage_errors
from fp4rl_jax.runs.report.data import RunData
from fp4rl_jax.runs.report.evals import EvalPoint, pass_points
from fp4rl_jax.runs.report.panels import PANELS, Panel, panel_series

#: Colours that stay apart for colour-blind readers (Okabe and Ito), by order of the runs.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#6B7280")
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_INK, _SOFT, _GRID = "#1F2933", "#52606D", "#E4E7EB"
_SINGLE = {"figsize": (6.4, 3.7), "dpi": 150, "facecolor": "white"}
_MARGINS = (0.125, 0.125, 0.86, 0.78)  # left, bottom, width, height, of the figure
#: Steps from which a running mean is drawn over the raw line.
SMOOTH_FROM = 40


def style_of(index: int) -> tuple[str, Literal["-", "--", ":", "-."]]:
    """(colour, line style) of the run at `index`: colours first, then the next dash."""
    return COLOURS[index % len(COLOURS)], _DASHES[index // len(COLOURS) % len(_DASHES)]


def draw(runs: Sequence[RunData], folder: Path) -> dict[str, Path]:
    """Draws every panel that at least one run can fill, and an overview of them all.

    Args:
        runs: the runs, overlaid in this order.
        folder: where the PNGs go; made when missing.

    Returns:
        The files by panel name, in the order of the report; "overview" is the last.

    Raises:
        MissingExtraError: matplotlib is not installed.
        StorageError: the disk refused.
    """
    figure_type = matplotlib_figure()
    drawable = [panel for panel in PANELS if _has_data(runs, panel)]
    files: dict[str, Path] = {}
    with storage_errors(folder, doing="write the report's pictures"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(len(pass_points(run)) > 0 for run in runs):
            figure = figure_type(**_SINGLE)
            _draw_evals(figure.add_axes(_MARGINS), runs)
            files["pass"] = save(figure, folder / "pass.png")
        for panel in drawable:
            figure = figure_type(**_SINGLE)
            _draw_panel(figure.add_axes(_MARGINS), runs, panel, legend=True)
            files[panel.name] = save(figure, folder / f"{panel.name}.png")
        if drawable:
            files["overview"] = save(_overview(figure_type, runs, drawable), folder / "overview.png")
    return files


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean over the finite values of a window that shrinks at the ends."""
    half = window // 2
    cut = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([np.nanmean(part) if np.isfinite(part).any() else np.nan for part in cut])


def log_floor(series: Sequence[np.ndarray]) -> float | None:
    """Where a log axis puts zeros: a tenth of the least positive value; None if nothing is positive."""
    positive = [values[values > 0] for values in series]
    least = min((float(part.min()) for part in positive if part.size), default=None)
    return None if least is None else least / 10


def in_band(rounding: float) -> float:
    """Where every value below `rounding` is drawn: the middle of the decade under it."""
    return rounding / 10**0.5


def least(panel: Panel, series: Sequence[np.ndarray]) -> float | None:
    """The least value of a panel's log axis; None for a linear one."""
    if panel.scale != "log":
        return None
    return log_floor(series) if panel.rounding is None else panel.rounding / 10


def rounding_band(axes: Any, rounding: float) -> None:
    """Shades the decade under `rounding`, says what it means, and shows at least four decades above it."""
    axes.set_ylim(rounding / 10, max(axes.get_ylim()[1], rounding * 1e4))
    axes.axhspan(rounding / 10, rounding, color=_GRID, zorder=0)
    axes.annotate(
        f"below {rounding:.0e}: the sides agree to float32 rounding",
        xy=(0.99, rounding),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=7.5,
        color=_SOFT,
    )


def _has_data(runs: Sequence[RunData], panel: Panel) -> bool:
    return any(np.isfinite(panel_series(run, panel)[1]).any() for run in runs)


def _draw_panel(axes: Any, runs: Sequence[RunData], panel: Panel, *, legend: bool) -> None:
    found = [panel_series(run, panel) for run in runs]
    floor = least(panel, [values for _, values in found])
    floored = False
    for index, (run, (steps, values)) in enumerate(zip(runs, found, strict=True)):
        if not np.isfinite(values).any():
            continue
        if panel.rounding is not None:
            values = np.where(values < panel.rounding, in_band(panel.rounding), values)
        elif floor is not None:
            floored |= bool((values <= 0).any())
            values = np.where(values <= 0, floor, values)
        _draw_line(axes, steps, values, index=index, label=run.label)
    dress(axes, panel.title, panel.unit)
    if floored:
        axes.set_title("exact zeros are drawn at the bottom", loc="right", fontsize=7.5, color=_SOFT)
    if panel.rounding is not None:
        rounding_band(axes, panel.rounding)
    if floor is not None:
        log_axis(axes)
    if panel.scale == "share":
        top = axes.get_ylim()[1]
        axes.set_ylim(-0.05 * top, 1.05 * top)  # so that a flat line is not on an edge
        axes.yaxis.set_major_formatter(_percent())
    if legend and len(runs) > 1:
        _legend(axes)


def _draw_line(axes: Any, steps: np.ndarray, values: np.ndarray, *, index: int, label: str) -> None:
    colour, dash = style_of(index)
    if len(steps) < SMOOTH_FROM:
        axes.plot(steps, values, dash, color=colour, linewidth=1.6, marker="o", markersize=2.6, label=label)
        return
    window = max(5, len(steps) // 20)
    axes.plot(steps, values, dash, color=colour, linewidth=0.7, alpha=0.3)
    axes.plot(steps, smooth(values, window), dash, color=colour, linewidth=1.8, label=label)


def _draw_evals(axes: Any, runs: Sequence[RunData]) -> None:
    """pass@1 against the step, with its 95 % intervals; runs stand a little apart."""
    spread = max((point.step for run in runs for point in pass_points(run)), default=1) or 1
    metric = next(point.metric for run in runs for point in pass_points(run))
    for index, run in enumerate(runs):
        points: list[EvalPoint] = pass_points(run)
        if not points:
            continue
        colour, dash = style_of(index)
        x = np.array([point.step for point in points]) + (index - (len(runs) - 1) / 2) * 0.012 * spread
        y = np.array([point.value for point in points])
        bars = np.array([[p.value - p.low for p in points], [p.high - p.value for p in points]])
        axes.errorbar(
            x,
            y,
            yerr=bars,
            fmt=f"o{dash}",
            color=colour,
            capsize=3,
            linewidth=1.6,
            markersize=4,
            label=run.label,
        )
    dress(axes, f"Held-out {metric}", f"{metric}, 95 % interval")
    axes.yaxis.set_major_formatter(_percent())
    if len(runs) > 1:
        _legend(axes)


def _overview(figure_type: Any, runs: Sequence[RunData], panels: Sequence[Panel]) -> Any:
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_type(
        figsize=(5.4 * columns, 2.9 * rows + 0.3), dpi=130, layout="constrained", facecolor="white"
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, runs, panel, legend=False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    if len(runs) > 1:
        lines = [proxy(index, run.label) for index, run in enumerate(runs)]
        figure.legend(
            handles=lines, loc="outside upper center", ncols=min(len(runs), 5), frameon=False, fontsize=9
        )
    return figure


def log_axis(axes: Any) -> None:
    """Powers of ten; below two decades also their 2- and 5-fold, as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="y", which="minor", length=0)


def dress(axes: Any, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.set_ylabel(unit, fontsize=9, color=_INK)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=_INK, length=0)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9AA5B1")


def _legend(axes: Any) -> None:
    axes.legend(fontsize=8, frameon=True, framealpha=0.9, edgecolor=_GRID, labelcolor=_INK)


def proxy(index: int, label: str) -> Any:
    from matplotlib.lines import Line2D

    colour, dash = style_of(index)
    return Line2D([], [], color=colour, linestyle=dash, linewidth=1.8, label=label)


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1.0)


def matplotlib_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", extra="run", purpose="a report") from None
    return Figure


def save(figure: Any, path: Path) -> Path:
    figure.savefig(
        path, metadata={"Software": None}, pil_kwargs={"compress_level": 4}
    )  # no version in the file: equal data, equal bytes
    return path
