"""The table of a sweep: a row an arm and choice of factors, spreads over keys, a verdict on the claim.

A figure is the mean over an arm's finished keys and the half-width of Student's 95 % interval of that mean;
with one key there is no such interval. A claim `a above b` agrees where the whole interval of a is above the
whole one of b, disagrees where it is below, and is too small to tell otherwise, or with one key. Seconds of
runs that shared their device with others, or ran on different ones, are neither shown nor judged.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from fp4rl_jax.cli._sweep_file import ArmSection, ExpectSection
from fp4rl_jax.cli._sweep_record import RunRecord, SweepRecord
from fp4rl_jax.runs import catalogue

ABSENT = "-"
AGREES, DISAGREES, SMALL = "agrees", "disagrees", "too small to tell"
UNTIMED = f"{SMALL}: runs not alone on one device"
UNTIMED_NOTE = (
    "Seconds and overheads are `-` where runs shared their device with others or ran on different ones, as"
    " their step times are not those of a run alone."
)
#: 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom; the last, which is wider, for more.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity over keys.

    Attributes:
        mean: over the keys.
        half: half-width of the 95 % interval of the mean, or None of one key.
        count: keys.
    """

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float:
        """The lower end; minus infinity of one key."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end; infinity of one key."""
        return math.inf if self.half is None else self.mean + self.half


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """An arm at one choice of the factors.

    Attributes:
        arm, factors: as the matrix has them.
        runs: one a key, whatever their state.
    """

    arm: str
    factors: tuple[tuple[str, str], ...]
    runs: tuple[RunRecord, ...]

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """The runs whose figures count."""
        return tuple(run for run in self.runs if run.state == "done")

    @property
    def begun(self) -> bool:
        """Whether any of its runs has a step or has failed."""
        return any(run.state != "to do" for run in self.runs)

    @property
    def whole(self) -> bool:
        """Whether every key is finished, so that a claim may be decided."""
        return len(self.finished) == len(self.runs)


def timed(runs: Sequence[RunRecord]) -> bool:
    """Whether step times of these runs compare: each was alone on its device, and all had the same kind."""
    return all(run.shared == 1 for run in runs) and len({run.made.get("device") for run in runs}) <= 1


def spread(values: Sequence[float]) -> Spread | None:
    """The mean of values over keys with its interval; None of no values."""
    if not values:
        return None
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Spread(mean=mean, half=None, count=1)
    quantile = STUDENT[min(count - 1, len(STUDENT)) - 1]
    return Spread(mean=mean, half=quantile * statistics.stdev(values) / math.sqrt(count), count=count)


def rows(record: SweepRecord) -> tuple[Row, ...]:
    """The rows in the order of the matrix."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[RunRecord]] = {}
    for run in record.runs:
        found.setdefault((run.arm, tuple(run.factors.items())), []).append(run)
    return tuple(Row(arm=arm, factors=at, runs=tuple(runs)) for (arm, at), runs in found.items())


def measure(name: str, row: Row, record: SweepRecord) -> Spread | None:
    """A column of a row over its finished keys; None where there is nothing to say."""
    if not timed(_timing(name, row, record)):
        return None
    if name == "overhead":
        return _overhead(row, record)
    values = [_of_run(name, run, last=record.sweep.last) for run in row.finished]
    return spread([value for value in values if value is not None])


def _of_run(name: str, run: RunRecord, *, last: int) -> float | None:
    """One run's value of a column; medians of a course where the name is a metrics key."""
    if name == "pass@1":
        return None if run.after is None else run.after[0]
    key, how = _COLUMNS.get(name, (name, statistics.median))
    values = [value for _, value in run.courses.get(key, ()) if value is not None]
    if name == "reward":
        values = values[-last:]
    if name == "step_seconds":
        values = values[1:]  # the first step compiles
    return how(values) if values else None


_COLUMNS: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "reward": ("reward_mean", statistics.fmean),
    "mismatch_kl": ("mismatch_kl", statistics.median),
    "mismatch_kl_worst": ("mismatch_kl", max),
    "logprob_gap_max": ("logprob_gap_max", max),
    "step_seconds": ("step_seconds", statistics.median),
}


def _timing(name: str, row: Row, record: SweepRecord) -> tuple[RunRecord, ...]:
    """The finished runs whose step times a column is made of; none where it is of other things."""
    if name == "overhead":
        base = _baseline(row, record)
        return () if base is None else (*row.finished, *base.finished)
    metric = catalogue.find(name)
    return row.finished if metric is not None and metric.clock else ()


def _baseline(row: Row, record: SweepRecord) -> Row | None:
    """The row whose step time this one's is compared with."""
    name = record.arm(row.arm).baseline or record.sweep.baseline
    return None if name is None or name == row.arm else _at(name, row, record)


def _overhead(row: Row, record: SweepRecord) -> Spread | None:
    """Step time over the baseline's of the same key and factors, less 1."""
    base = _baseline(row, record)
    if base is None:
        return None
    theirs = {run.key: _of_run("step_seconds", run, last=1) for run in base.finished}
    ratios = []
    for run in row.finished:
        ours, other = _of_run("step_seconds", run, last=1), theirs.get(run.key)
        if ours is not None and other:
            ratios.append(ours / other - 1)
    return spread(ratios)


def _at(arm: str, row: Row, record: SweepRecord) -> Row:
    """Another arm at the factors of `row`."""
    return next(other for other in rows(record) if other.arm == arm and other.factors == row.factors)


def verdict(row: Row, record: SweepRecord) -> str:
    """A word or few on an arm's claim, by the rule of this module; `ABSENT` while it is not decidable.

    All expectations have to hold for "agrees"; one that is contradicted makes "disagrees".
    """
    expected = record.arm(row.arm).expect
    found = {_decide(one, row, record) for one in expected}
    for word in (DISAGREES, ABSENT, UNTIMED, SMALL):
        if word in found:
            return word
    return AGREES if found else ABSENT


def _decide(one: ExpectSection, row: Row, record: SweepRecord) -> str:
    other = None if one.arm is None else _at(one.arm, row, record)
    both = [row] if other is None else [row, other]
    if not all(side.whole for side in both):
        return ABSENT
    if not timed([run for side in both for run in _timing(one.measure, side, record)]):
        return UNTIMED
    ours = measure(one.measure, row, record)
    if other is None:
        assert one.value is not None
        theirs = Spread(mean=one.value, half=0.0, count=0)
    else:
        theirs = measure(one.measure, other, record)
    if ours is None or theirs is None:
        return ABSENT
    upper, lower = (ours, theirs) if one.relation == "above" else (theirs, ours)
    if upper.low > lower.high:
        return AGREES
    return DISAGREES if upper.high < lower.low else SMALL


def markdown(record: SweepRecord) -> str:
    """The table, lines before it for every failure and for what has not begun, and a sentence below it where
    times are left out."""
    found = tuple(row for row in rows(record) if row.begun)
    factors = [key for key, _ in record.sweep.factors.values]
    heads = [
        "arm", *factors, "keys", f"reward, last {record.sweep.last}", "pass@1 before", "after",
        "k3, nats a token: median", "worst", "largest gap, nats", *record.sweep.columns, "s/step", "overhead",
        "claim", "verdict",
    ]  # fmt: skip
    failed = [run for run in record.runs if run.state in ("failed", "other config")]
    notes = [
        f"- `{run.name}` {run.state}, step {run.steps} of {run.total}: {' '.join(run.message.split())}"
        for run in failed
    ]
    notes += _not_begun([row for row in rows(record) if not row.begun])
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    lines += ["| " + " | ".join(map(_escaped, _cells(row, record))) + " |" for row in found]
    if not all(timed(_timing(name, row, record)) for row in found for name in ("step_seconds", "overhead")):
        lines += ["", UNTIMED_NOTE]
    return "\n".join([*notes, *([""] if notes else []), *lines]) + "\n"


def _cells(row: Row, record: SweepRecord) -> list[str]:
    arm: ArmSection = record.arm(row.arm)
    small = [measure(name, row, record) for name in ("mismatch_kl", "mismatch_kl_worst", "logprob_gap_max")]
    more = [measure(name, row, record) for name in record.sweep.columns]
    overhead = measure("overhead", row, record)
    return [
        f"`{row.arm}`", *(value for _, value in row.factors), _state(row),
        _shown(measure("reward", row, record), ".3f"), _passed(row, "before"), _passed(row, "after"),
        *(_shown(value, ".2g") for value in (*small, *more)),
        _shown(measure("step_seconds", row, record), ".3g"), _shown(overhead, "+.1%"),
        arm.claim or ABSENT, verdict(row, record),
    ]  # fmt: skip


def _not_begun(left: Sequence[Row]) -> list[str]:
    """A line with the rows of which nothing has run, the factors of an arm together; none of no rows."""
    arms: dict[str, list[str]] = {}
    for row in left:
        arms.setdefault(row.arm, []).append(", ".join(value for _, value in row.factors))
    named = [f"`{arm}`" + (f" ({'; '.join(at)})" if any(at) else "") for arm, at in arms.items()]
    return [f"- not begun: {', '.join(named)}"] if named else []


def _state(row: Row) -> str:
    """Finished keys of all, and what those are that have begun."""
    others = [run for run in row.runs if run.state not in ("done", "to do")]
    left = [f"key {run.key}: {run.state}, {run.steps} of {run.total} steps" for run in others]
    return "; ".join([f"{len(row.finished)}/{len(row.runs)}", *left])


def _passed(row: Row, when: str) -> str:
    """pass@1 over keys; of a single key with the evaluation's own interval."""
    points = [getattr(run, when) for run in row.finished]
    points = [point for point in points if point is not None]
    if len(points) == 1:
        value, low, high = points[0]
        return f"{value:.3f} [{low:.2f}, {high:.2f}]"
    return _shown(spread([point[0] for point in points]), ".3f")


def _shown(value: Spread | None, form: str) -> str:
    if value is None:
        return ABSENT
    half = "" if value.half is None else f" ± {value.half:{form.lstrip('+')}}"
    return f"{value.mean:{form}}{half}"


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
