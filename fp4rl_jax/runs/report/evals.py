"""Evaluations of a run: the points of the picture, and before against after."""

import math
from dataclasses import dataclass
from typing import Any

from fp4rl_jax.runs.report.data import RunData


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation with its 95 % interval, all as shares of the items."""

    step: int
    name: str
    metric: str
    value: float
    low: float
    high: float
    count: int


def pass_points(run: RunData) -> list[EvalPoint]:
    """The run's evaluations of its first metric (pass@1 as a rule) in the order of their steps."""
    points = [_point(record) for record in run.evals if _complete(record) and record["name"] != "difference"]
    metric = "pass@1" if any(point.metric == "pass@1" for point in points) else None
    chosen = [p for p in points if p.metric == (metric or points[0].metric)]
    return sorted(chosen, key=lambda point: point.step)


def before_after(run: RunData) -> tuple[EvalPoint, EvalPoint] | None:
    """The first and the last evaluation of the run, or None if there are not two."""
    points = pass_points(run)
    return (points[0], points[-1]) if len(points) > 1 else None


def difference(run: RunData) -> EvalPoint | None:
    """after - before with its 95 % interval; None without two evaluations.

    The run's own record "difference" (paired over items) if it has one; otherwise the interval for
    two independent proportions built from their own intervals (Newcombe 1998, method 10), which is
    wider than a paired one.
    """
    pair = before_after(run)
    if pair is None:
        return None
    stated = [_point(record) for record in run.evals if _complete(record) and record["name"] == "difference"]
    if stated:
        return stated[-1]
    before, after = pair
    delta = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return EvalPoint(after.step, "difference", after.metric, delta, delta - down, delta + up, after.count)


def _complete(record: dict[str, Any]) -> bool:
    return all(isinstance(record.get(key), int | float) for key in ("step", "value", "low", "high"))


def _point(record: dict[str, Any]) -> EvalPoint:
    return EvalPoint(
        step=record["step"],
        name=str(record.get("name", "")),
        metric=str(record.get("metric", "score")),
        value=float(record["value"]),
        low=float(record["low"]),
        high=float(record["high"]),
        count=int(record.get("count", 0)),
    )
