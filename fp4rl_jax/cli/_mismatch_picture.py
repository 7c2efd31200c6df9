"""The picture of `fp4rl mismatch`: both columns of the components, and the sites by layer."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np

if TYPE_CHECKING:
    from fp4rl_jax.analysis.attribution import Attribution
    from fp4rl_jax.analysis.layers import SiteLayers

matplotlib.use("Agg")  # no display is needed, or looked for
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

INK, IN, OUT, FAINT = "#1f2937", "#2563eb", "#d97706", "#6b7280"


def draw(found: "Attribution", sites: "dict[str, SiteLayers]", title: str, path: Path) -> None:
    """Writes a PNG: bars a component on the left, relative distance and code flips by layer on the right."""
    figure, axes = plt.subplot_mosaic(
        [["bars", "distance"], ["bars", "flips"]],
        figsize=(12, 6.2),
        layout="constrained",
        width_ratios=(1.15, 1),
    )
    total = found.total
    figure.suptitle(
        f"{title}: gap {total.mean:.3g} nats a token over {total.tokens} tokens, opened by: {found.named}",
        fontsize=11, color=INK,
    )  # fmt: skip
    _bars(axes["bars"], found)
    relative = {site: layers.relative for site, layers in sites.items()}
    _lines(axes["distance"], relative, "‖Q_train(X) - Q_roll(X)‖ / ‖X‖, the rollout's X")
    flips = {site: layers.flips for site, layers in sites.items() if layers.flips is not None}
    _lines(axes["flips"], flips, "share of activation codes that differ between the sides")
    axes["flips"].set_xlabel("layer", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(axis: Any, found: "Attribution") -> None:
    """Two bars a component; a note where there is nothing to measure."""
    rows: list[tuple[str, float | None, float | None, str]] = [
        (
            swap.component,
            None if swap.opened is None else swap.opened.mean,
            swap.closed,
            "" if swap.status == "measured" else f"{swap.status}: {swap.reason}",
        )
        for swap in found.swaps
    ]
    rows.append(("interactions", found.interaction_in, found.interaction_out, ""))
    rows.append(("unexplained rest", found.rest_rollout.mean, found.rest_trainer.mean, ""))
    for place, (_, opened, closed, note) in enumerate(rows):
        for value, offset, color in ((opened, -0.19, IN), (closed, 0.19, OUT)):
            if value is not None:
                axis.barh(place + offset, value, height=0.36, color=color)
        if note:
            axis.text(0.0, place, f" {note}", va="center", fontsize=8, color=FAINT)
    axis.axvline(0, color=INK, lw=0.8)
    axis.axvline(found.explained.mean, color=FAINT, lw=0.8, ls="--")
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("nats a token (dashed: the whole gap)", fontsize=9)
    handles = [Patch(color=color) for color in (IN, OUT)]
    axis.legend(handles, ["swapped in: opens", "swapped out: closes"], fontsize=8, loc="lower right")
    _plain(axis)


def _lines(axis: Any, values: "dict[str, np.ndarray]", title: str) -> None:
    """A line a site over the layers, or a note that there is none."""
    shown: Callable[[np.ndarray], bool] = lambda x: bool(np.isfinite(x).any())  # noqa: E731
    for site, found in values.items():
        if shown(found):
            axis.plot(range(len(found)), found, marker="o", ms=3, lw=1.2, label=site)
    if any(shown(found) for found in values.values()):
        axis.legend(fontsize=8)
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
    else:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.text(0.5, 0.5, "not applicable: no site with codes on both sides", ha="center", va="center",
                  transform=axis.transAxes, fontsize=8, color=FAINT)  # fmt: skip
    axis.set_title(title, fontsize=9, color=INK)
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
