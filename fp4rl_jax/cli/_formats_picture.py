"""The picture of `fp4rl formats`: where values fall among each format's grid points."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np

if TYPE_CHECKING:
    from fp4rl_jax.cli.formats import Report

matplotlib.use("Agg")  # no display is needed, or looked for
from matplotlib import pyplot as plt  # noqa: E402

INK, GRID, FILL = "#1f2937", "#b91c1c", "#93c5fd"


def draw(reports: "Sequence[Report]", title: str, path: Path) -> None:
    """Writes a PNG with one histogram a format: values over their scales, the grid as red lines."""
    columns = 2 if len(reports) > 1 else 1
    rows = -(-len(reports) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(6.4 * columns, 3.0 * rows + 0.7), squeeze=False, layout="constrained"
    )
    figure.suptitle(f"Values over their scales, and the grid they are rounded to\n{title}", fontsize=11)
    for axis, report in zip(axes.flat, reports, strict=False):
        _panel(axis, report)
    for axis in list(axes.flat)[len(reports) :]:
        axis.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axis, report: "Report") -> None:
    from fp4rl_jax.cli.formats import describe, magnitudes

    points = magnitudes(report.fmt)
    limit = points[-1] * 1.36  # a scale rounded down leaves values beyond the last grid point
    axis.hist(np.clip(report.ratio, -limit, limit), bins=241, range=(-limit, limit), density=True, color=FILL)
    signed = sorted({s * p for p in points for s in (-1.0, 1.0)})
    fine = len(signed) > 64  # too many lines to tell apart: a thinner, paler comb
    axis.vlines(
        signed, 0, 1, transform=axis.get_xaxis_transform(), color=GRID, lw=0.3 if fine else 0.9, alpha=0.7
    )
    axis.set_xlim(-limit, limit)
    axis.set_title(
        f"{describe(report.fmt)}: {report.bits:.4g} bits, relative error {report.relative_error:.2e}",
        fontsize=9,
        color=INK,
    )
    axis.set_yticks([])
    axis.tick_params(labelsize=8)
    for side in ("top", "left", "right"):
        axis.spines[side].set_visible(False)
