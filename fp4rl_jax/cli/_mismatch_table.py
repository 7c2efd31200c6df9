"""The tables of `fp4rl mismatch`."""

from typing import TYPE_CHECKING

import numpy as np

from fp4rl_jax.runs.errors import missing_extra

if TYPE_CHECKING:
    from rich.table import Table

    from fp4rl_jax.analysis.attribution import Attribution
    from fp4rl_jax.analysis.layers import SiteLayers


def show(found: "Attribution", sites: "dict[str, SiteLayers]") -> None:
    """Prints both columns of the components, the rest, and the sites.

    Raises:
        MissingExtraError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise missing_extra("rich", extra="run", purpose="the tables of fp4rl mismatch") from None
    console = Console(width=110, highlight=False)
    console.print(components(found))
    console.print(by_site(sites))
    console.print(verdict(found))


def components(found: "Attribution") -> "Table":
    """A row a component, then what is not theirs; nats a token."""
    from rich.table import Table

    total = found.total
    table = Table(
        title=f"log-prob gap {total.mean:.3g} nats a token (max {total.largest:.3g}, k3 {total.k3:.3g},"
        f" {total.moved:.1%} moved, {total.tokens} tokens)"
    )
    for name in ("component", "swapped in: opens", "swapped out: closes", "left without it", "note"):
        table.add_column(name, justify="left" if name in ("component", "note") else "right")
    for swap in found.swaps:
        note = swap.reason if swap.status == "measured" else f"{swap.status}: {swap.reason}"
        figures = (
            "-" if swap.opened is None else f"{swap.opened.mean:.3g}",
            "-" if swap.closed is None else f"{swap.closed:+.3g}",
            "-" if swap.left is None else f"{swap.left.mean:.3g}",
        )
        table.add_row(swap.component, *figures, note)
    table.add_section()
    table.add_row(
        "interactions", f"{found.interaction_in:+.3g}", f"{found.interaction_out:+.3g}", "",
        "explained gap less the sum of the column",
    )  # fmt: skip
    table.add_row(
        "unexplained rest", f"{found.rest_rollout.mean:.3g}", f"{found.rest_trainer.mean:.3g}", "",
        "all swapped in, to the record; all out, to the trainer",
    )  # fmt: skip
    return table


def by_site(sites: "dict[str, SiteLayers]") -> "Table":
    """A row a site: means over its layers, and the layer where the two quantizers are farthest apart."""
    from rich.table import Table

    table = Table(title="activations, the rollout's input X under both sides' quantizers")
    heads = ("site", "|Qt(X)-Qr(X)|/|X|", "farthest layer", "code flips", "one step", "underflow t / r")
    for name in (*heads, "residual energy"):
        table.add_column(name, justify="left" if name == "site" else "right")
    for site, found in sites.items():
        under = f"{_share(found.underflow_trainer)} / {_share(found.underflow_rollout)}"
        energy = f"{np.nanmean(found.residual_before):.1e} > {np.nanmean(found.residual_after):.1e}"
        table.add_row(
            site, f"{np.nanmean(found.relative):.3g}", f"{int(np.nanargmax(found.relative))}",
            _share(found.flips), _share(found.one_step), under, energy,
        )  # fmt: skip
    return table


def _share(values: "np.ndarray | None") -> str:
    if values is None:
        return "n/a"
    return f"{np.nanmean(values):.2%}" if np.isfinite(values).any() else "none"


def verdict(found: "Attribution") -> str:
    """One line: what opens the gap, and whether both columns say so."""
    if found.named == "nothing":
        return "No component opens a gap above float32 rounding."
    if found.named == found.opens_most:
        return f"What opens the gap: {found.named} (both columns)."
    return f"What opens the gap: {found.named} (swapped out); swapped in, {found.opens_most} opens most."
