"""Which pictures a report has: each panel's metric, title, unit, axis and how to read it."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from fp4rl_jax.runs.report.data import RunData


@dataclass(frozen=True)
class Panel:
    """One picture.

    Attributes:
        name: the file's name, without ".png".
        title: what a reader calls it.
        unit: the label of the y axis.
        key: the metrics key; one with a "*" stands for the mean over all keys that match.
        scale: the y axis; "share" is linear in percent from just below 0.
        hint: one sentence on what good looks like.
        rounding: for a log axis, the value below which a number says no more than that both sides agree to
            float32 rounding; such values are drawn as one level in a band that says so.
    """

    name: str
    title: str
    unit: str
    key: str
    scale: Literal["linear", "log", "share"]
    hint: str
    rounding: float | None = None


#: A log-prob is a logit less a logsumexp, of magnitude 16 to 32 at most, where float32 numbers are 2e-6
#: apart; five of those are what some roundings leave. k3 of a gap g is g^2 / 2.
ROUNDING_GAP = 1e-5
ROUNDING_KL = ROUNDING_GAP**2 / 2
_BAND = " In the grey band they agree to float32 rounding."


def _underflow(what: str, title: str, values: str) -> Panel:
    return Panel(
        f"underflow_{what}",
        title,
        "share of values rounded to zero",
        f"quant/{what}/*/underflow",
        "share",
        f"Mean over sites of the non-zero {values} whose code is zero.",
    )


PANELS = (
    Panel("reward", "Reward", "mean reward", "reward_mean", "linear", "Rises when training works."),
    Panel(
        "mismatch",
        "Rollout/trainer mismatch",
        "k3 KL (nats/token)",
        "mismatch_kl",
        "log",
        "How far the sampler's distribution is from the trainer's; lower is better." + _BAND,
        ROUNDING_KL,
    ),
    Panel(
        "logprob_gap",
        "Largest log-prob gap",
        "max |gap| (nats)",
        "logprob_gap_max",
        "log",
        "The worst token of the step, sampler against trainer." + _BAND,
        ROUNDING_GAP,
    ),
    Panel(
        "moved",
        "Tokens moved by more than 0.01 nats",
        "share of tokens",
        "moved_share",
        "share",
        "Flipped activation codes move tokens; with fixed-order sums and equal codes it is 0.",
    ),
    _underflow("rollout", "Activation underflow, rollout", "activations in the rollout"),
    _underflow("trainer", "Activation underflow, trainer", "activations in the trainer"),
    _underflow("weights", "Weight underflow", "published weights"),
    Panel("entropy", "Policy entropy", "nats/token", "entropy", "linear", "A fall to 0 is a collapse."),
    Panel(
        "length",
        "Completion length",
        "mean tokens",
        "completion_length_mean",
        "linear",
        "Sudden growth often means that stop tokens are lost.",
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "global norm before clipping",
        "grad_norm",
        "log",
        "Spikes mark steps worth a look.",
    ),
    Panel(
        "throughput",
        "Rollout speed",
        "sampled tokens/s",
        "tokens_per_second",
        "linear",
        "The first step compiles.",
    ),
)


def panel_series(run: RunData, panel: Panel) -> tuple[np.ndarray, np.ndarray]:
    """([S] steps, [S] values) of a panel for a run; both empty if the run lacks the metric."""
    if "*" not in panel.key:
        return run.series(panel.key)
    keys = [key for key in run.keys() if fnmatchcase(key, panel.key)]
    by_step: dict[int, list[float]] = {}
    for key in keys:
        for step, value in zip(*run.series(key), strict=True):
            by_step.setdefault(int(step), []).append(float(value))
    steps = np.array(sorted(by_step), np.int64)
    return steps, np.array([np.mean(by_step[step]) for step in steps.tolist()], np.float64)


def missing(runs: list[RunData]) -> list[str]:
    """A line for each panel that some run cannot fill, saying which metric is absent."""
    lines = []
    for panel in PANELS:
        lacking = [run.label for run in runs if not np.isfinite(panel_series(run, panel)[1]).any()]
        if lacking:
            where = "every run" if len(lacking) == len(runs) else ", ".join(lacking)
            lines.append(f"{panel.title}: {panel.key} is absent in {where}")
    return lines


def panel_of(key: str) -> Panel:
    """The panel of a metrics key: the report's where it has one, otherwise a plain linear one."""
    known = (panel for panel in PANELS if panel.key == key)
    return next(known, Panel(key.replace("/", "_"), key, key, key, "linear", ""))
