"""What a sweep file says: arms, factors, keys, budget; see docs/SWEEP.md."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from fp4rl_jax.arrays import check_name, unknown_name
from fp4rl_jax.configuring import ConfigError, build, read_file
from fp4rl_jax.configuring.build import join, section
from fp4rl_jax.runs.directory import flatten

Scalar = bool | int | float | str

#: Columns of the table that a claim can be about.
Measure = Literal[
    "reward",
    "pass@1",
    "mismatch_kl",
    "mismatch_kl_worst",
    "logprob_gap_max",
    "step_seconds",
    "overhead",
]

#: Courses that every record has.
COURSES = ("reward_mean", "mismatch_kl", "logprob_gap_max", "step_seconds")

#: What is kept of a finished run's folder.
Keep = Literal["all", "results"]

#: What names a run's folder, together with factors and keys.
NAME = re.compile(r"[A-Za-z0-9_.+-]+")
#: Set by the sweep for every run.
OWN = ("run.name", "run.root", "run.seed", "run.resume")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Declared factors, which multiply into the matrix.

    Attributes:
        values: dotted configuration keys, each with the values that it takes.
    """

    values: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, path: str) -> Self:
        """Builds the factors from a table of lists; ConfigError naming the key and the value."""
        found = []
        for key, levels in flatten(section(values, path=path)).items():
            where = join(path, key)
            if not isinstance(levels, list) or not levels:
                raise ConfigError(f"{where}: expected a list of at least one value, got {levels!r}")
            for level in levels:
                if not isinstance(level, Scalar) or not NAME.fullmatch(text(level)):
                    raise ConfigError(
                        f"{where}: expected letters, digits and _.+-, as they name folders, got {level!r}"
                    )
            _require_distinct(map(text, levels), what=where)
            found.append((key, tuple(levels)))
        return cls(values=tuple(found))

    def to_values(self) -> dict[str, Any]:
        """The table as `from_values` takes it."""
        return {key: list(levels) for key, levels in self.values}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetSection:
    """How long one call may run.

    Attributes:
        seconds: after which no step is begun, wall clock; none has no end.
    """

    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"budget.seconds = {self.seconds}: expected a finite number above 0, or none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectSection:
    """A claim as something that the table can decide.

    Attributes:
        measure: the column.
        relation: on which side of `arm`'s value, or of `value`, the arm's is claimed to be.
        arm: another arm, taken at the same factors.
        value: a fixed number instead.
    """

    measure: Measure
    relation: Literal["above", "below"]
    arm: str | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if (self.arm is None) == (self.value is None):
            raise ValueError(f"expected one of arm and value, got {self.arm!r} and {self.value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmSection:
    """One arm.

    Attributes:
        name: of its runs' folders and in the table.
        config: files merged after the sweep's.
        set: `key.path=value`, after the sweep's.
        keys: instead of the sweep's; none takes those.
        baseline: the arm whose step its own is compared with, instead of the sweep's.
        policy_of: an arm above it, whose final policies it evaluates as its own settings publish them; it
            trains nothing. None trains.
        slots: of `--workers`, how many a run of it takes, where one's memory is that of several.
        claim: printed beside the result.
        expect: the claim as the table decides it; all of it has to hold.
    """

    name: str
    config: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    keys: tuple[int, ...] | None = None
    baseline: str | None = None
    policy_of: str | None = None
    slots: int = 1
    claim: str = ""
    expect: tuple[ExpectSection, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r}: expected letters, digits and _.+-, as it names a folder")
        if self.keys is not None:
            _require_keys(self.keys)
        if self.slots < 1:
            raise ValueError(f"arm {self.name!r}: slots = {self.slots}: expected at least 1")
        _require_not_own(self.set)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSection:
    """A sweep.

    Attributes:
        title: of its table and picture.
        root: the folder of its runs, its results and its compilation cache.
        config: configuration files of every arm.
        set: `key.path=value` of every arm.
        keys: run seeds of an arm.
        factors: what multiplies the matrix.
        budget: how long one call may run.
        baseline: the arm whose step others are compared with.
        last: steps at a run's end whose mean reward is the table's.
        draw: metrics keys of the picture, a row of panels each.
        batch_keys: "off", one run after another; "on", an arm's keys in one program, is refused: a key's
            run would not be its own run's bits (docs/SWEEP.md).
        columns: further metrics keys of the table, medians over the steps; `*` means over all that match.
        record: further metrics keys of the record alone, for the sweeps that take runs from it.
        keep: of a finished run "all", or "results": metrics and transcripts, and no checkpoints unless
            an arm evaluates its policy.
        arms: in the order in which they are run.
    """

    title: str
    root: str
    config: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    keys: tuple[int, ...] = (0,)
    factors: Factors = Factors()
    budget: BudgetSection = BudgetSection()
    baseline: str | None = None
    last: int = 20
    draw: tuple[str, ...] = ("reward_mean", "mismatch_kl")
    columns: tuple[str, ...] = ()
    record: tuple[str, ...] = ()
    keep: Keep = "all"
    batch_keys: Literal["off", "on"] = "off"
    arms: tuple[ArmSection, ...]

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("arms: expected at least one, got none")
        names = [arm.name for arm in self.arms]
        _require_distinct(names, what="arms: name")
        _require_keys(self.keys)
        _require_not_own(self.set)
        if self.last < 1:
            raise ValueError(f"last = {self.last}: expected at least 1 step")
        if self.baseline is not None:
            check_name("baseline", self.baseline, names)
        for arm in self.arms:
            self._require_known(arm, names)

    @property
    def courses(self) -> tuple[str, ...]:
        """The metrics keys that the record keeps of every run."""
        return tuple(dict.fromkeys((*COURSES, *self.draw, *self.columns, *self.record)))

    def _require_known(self, arm: ArmSection, names: list[str]) -> None:
        """Refuses arms that are not there, and a factor that an arm sets itself."""
        others = [
            ("baseline", arm.baseline),
            ("policy_of", arm.policy_of),
            *(("expect.arm", one.arm) for one in arm.expect),
        ]
        for what, other in others:
            if other is not None and other not in names:
                raise ValueError(f"arm {arm.name!r}: {unknown_name(what, other, names)}")
        for key, _ in self.factors.values:
            taken = [word for word in (*self.set, *arm.set) if word.partition("=")[0].strip() == key]
            if taken:
                raise ValueError(f"arm {arm.name!r} sets {taken[-1]!r}, and {key} is a factor")
        if self.baseline is None and arm.baseline is None:
            asked = [one for one in arm.expect if one.measure == "overhead"]
            if asked:
                raise ValueError(f"arm {arm.name!r} expects an overhead, and no baseline is named")

    def keys_of(self, arm: ArmSection) -> tuple[int, ...]:
        """The arm's keys."""
        return self.keys if arm.keys is None else arm.keys


def load(path: str) -> SweepSection:
    """Reads a sweep file.

    Raises:
        ConfigError: it cannot be read, or says something that is not understood; names file and value.
    """
    try:
        return build(SweepSection, read_file(path))
    except ConfigError as error:
        raise ConfigError(str(error) if path in str(error) else f"{path}: {error}") from error


def text(value: Scalar) -> str:
    """A factor's value as a configuration word and a folder's name have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _require_distinct(values: Iterable[Any], *, what: str) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ConfigError(f"{what} {twice[0]!r} is there twice, expected it once")


def _require_keys(keys: tuple[int, ...]) -> None:
    if not keys:
        raise ValueError("keys: expected at least one, got none")
    _require_distinct(keys, what="keys:")


def _require_not_own(words: tuple[str, ...]) -> None:
    for word in words:
        if word.partition("=")[0].strip() in OWN:
            raise ValueError(f"set {word!r}: the sweep sets {', '.join(OWN)} itself")
