"""From a sweep file to its runs: every arm x factors x key as a resolved configuration, and how far it is."""

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from fp4rl_jax import config as configs
from fp4rl_jax.arrays import check_name
from fp4rl_jax.cli import _flags, _sweep_finished
from fp4rl_jax.cli._sweep_file import ArmSection, Keep, SweepSection, text
from fp4rl_jax.config import Config, ConfigError
from fp4rl_jax.runs import Checkpointer
from fp4rl_jax.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    EVALS,
    MAY_CHANGE,
    config_fingerprint,
    differing,
    flatten,
)
from fp4rl_jax.runs.files import read_json, read_lines

State = Literal["to do", "partial", "done", "other config"]
#: What two runs of one digest may differ in; a run of other steps is another one once it is finished.
BESIDE = tuple(key for key in MAY_CHANGE if key != "loop.steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """An arm at one choice of the factors: a row of the table.

    Attributes:
        arm: its name.
        factors: (dotted key, value as text), in the order of the file.
    """

    arm: str
    factors: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """As folders and lines name it, e.g. `quads-dtype`."""
        return "-".join([self.arm, *(value for _, value in self.factors)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the matrix.

    Attributes:
        group: its arm and factors. key: its seed.
        files, words: what `fp4rl train` would take as `--config` and `--set`.
        overrides: of the words those that are not every arm's.
        config: what files and words resolve to.
        source: the run whose final policy this one evaluates, training nothing, or None.
        slots: of the workers, how many it takes while it runs.
        keep: of its folder once it is finished; "all" where another run evaluates its policy.
    """

    group: Group
    key: int
    files: tuple[str, ...]
    words: tuple[str, ...]
    overrides: tuple[str, ...]
    config: Config
    source: "Cell | None" = None
    slots: int = 1
    keep: Keep = "all"

    @property
    def name(self) -> str:
        """The run's folder under the sweep's root."""
        return self.config.run.name

    @property
    def steps(self) -> int:
        """The steps that it trains."""
        return 0 if self.source else self.config.loop.steps

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved configuration by dotted key."""
        return flatten(configs.as_dict(self.config))

    @property
    def digest(self) -> str:
        """`digest_among` all keys that there are."""
        return self.digest_among(None)

    def digest_among(self, known: frozenset[str] | None) -> str:
        """SHA-256 of the resolved configuration, and of that whose policy it evaluates.

        It does not count where the run lies, what of it is kept and shown, and the mesh.

        Args:
            known: dotted keys that there were when the digest was made with which this one is compared. A key
                that has come since counts only where it is set. None counts every key.
        """
        plain = self.settings
        if known is not None and not plain.keys() <= known:
            unset = configs.unset(self.config)
            plain = {key: value for key, value in plain.items() if key in known or value != unset[key]}
        if self.source is not None:
            plain["policy_of"] = self.source.digest_among(known)
        return config_fingerprint(plain, may_change=BESIDE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a cell's run is.

    Attributes:
        state: as named; "other config" is a run that this cell's configuration cannot resume.
        steps: that its next start has behind it.
        difference: the first difference of "other config", else empty.
    """

    state: State
    steps: int
    difference: str = ""


def expand(sweep: SweepSection) -> tuple[Cell, ...]:
    """Every run of a sweep, in the order in which they are run: arms, then factors, then keys.

    Raises:
        ConfigError: `batch_keys` is on, a configuration refuses an override, two runs would be the same or
            share a folder, or nothing names a model and a task; names the arm and the value.
    """
    if sweep.batch_keys == "on":
        raise ConfigError(
            "batch_keys = 'on': an update of several keys in one program does not give each key the bits of"
            " its own run, so it could not be resumed as one (docs/SWEEP.md): expected 'off'"
        )
    cells = _with_keep(tuple(_cells(sweep)), sweep.keep)
    seen: dict[str, Cell] = {}
    folders: dict[str, Cell] = {}
    for cell in cells:
        other = folders.setdefault(cell.name, cell)
        if other is not cell:
            raise ConfigError(
                f"arms {other.group.arm!r} and {cell.group.arm!r} share the folder {cell.name!r}"
            )
        other = seen.setdefault(_meaning(cell), cell)
        if other is not cell:
            raise ConfigError(
                f"{other.name!r} and {cell.name!r} are the same configuration: expected arms, factors and"
                " keys that differ in a setting"
            )
    return cells


def _with_keep(cells: tuple[Cell, ...], keep: Keep) -> tuple[Cell, ...]:
    sources = {cell.source.name for cell in cells if cell.source is not None}
    return tuple(dataclasses.replace(cell, keep="all" if cell.name in sources else keep) for cell in cells)


def _cells(sweep: SweepSection) -> Iterator[Cell]:
    keys = [key for key, _ in sweep.factors.values]
    levels = [values for _, values in sweep.factors.values]
    made: dict[tuple[Group, int], Cell] = {}
    for arm in sweep.arms:
        for chosen in itertools.product(*levels):
            factors = tuple(zip(keys, map(text, chosen), strict=True))
            for key in sweep.keys_of(arm):
                cell = _cell(sweep, arm, Group(arm=arm.name, factors=factors), key)
                if arm.policy_of is not None:
                    source = made.get((Group(arm=arm.policy_of, factors=factors), key))
                    cell = dataclasses.replace(cell, source=_sound_source(source, cell, arm.policy_of))
                yield made.setdefault((cell.group, key), cell)


def _cell(sweep: SweepSection, arm: ArmSection, group: Group, key: int) -> Cell:
    files = (*sweep.config, *arm.config)
    factors = [f"{name}={value}" for name, value in group.factors]
    own = (f"run.name={group.name}-{key}", f"run.root={sweep.root}", f"run.seed={key}", "run.resume=auto")
    words = (*sweep.set, *arm.set, *factors, *own)
    try:
        _flags.require_named(files, words, ("model",), ("task",))
        config = configs.load(files, words)
    except ConfigError as error:
        at = "".join(f", {name} = {value}" for name, value in group.factors)
        raise ConfigError(f"arm {arm.name!r}{at}: {error}") from error
    policy = [] if arm.policy_of is None else [f"policy of {arm.policy_of}:"]
    overrides = (*policy, *arm.config, *arm.set, *factors, f"run.seed={key}")
    return Cell(
        group=group,
        key=key,
        files=files,
        words=words,
        overrides=overrides,
        config=config,
        slots=arm.slots,
    )


def _sound_source(source: Cell | None, cell: Cell, arm: str) -> Cell:
    """The run whose policy `cell` evaluates.

    Raises:
        ConfigError: there is none before it, it does not train either, or nothing is evaluated.
    """
    if source is None or source.source is not None:
        expected = f"expected an arm above it that trains with key {cell.key}"
        raise ConfigError(f"arm {cell.group.arm!r}: policy_of = {arm!r}: {expected}")
    if not cell.config.eval.problems:
        raise ConfigError(f"arm {cell.group.arm!r}: policy_of = {arm!r}, and eval.problems = 0")
    return source


def _meaning(cell: Cell) -> str:
    """What two runs of one meaning share: everything but the folder."""
    plain = configs.as_dict(cell.config)
    plain["policy_of"] = cell.source.name if cell.source else None
    plain["run"] = {key: value for key, value in plain["run"].items() if key != "name"}
    return json.dumps(plain, sort_keys=True)


def progress(cell: Cell) -> Progress:
    """What lies in the cell's folder, read without opening it."""
    path = cell.config.run.path
    steps = Checkpointer(path / CHECKPOINTS).steps() if (path / CHECKPOINTS).is_dir() else ()
    done = max([*steps, _sweep_finished.steps(path)])
    evaluated = [line["step"] for line in read_lines(path / EVALS)]
    if not done and not steps and not evaluated:
        return Progress(state="to do", steps=0)
    changed = differing(read_json(path / CONFIG), configs.as_dict(cell.config))
    if changed:
        key, saved, now = changed[0]
        return Progress(state="other config", steps=done, difference=f"{key}: saved {saved!r}, now {now!r}")
    total = cell.config.loop.steps
    finished = done >= cell.steps and (cell.config.eval.problems == 0 or total in evaluated)
    return Progress(state="done" if finished else "partial", steps=done)


def named(cells: Sequence[Cell], name: str) -> Cell:
    """The run of that name; ValueError with the nearest one where there is none."""
    check_name("run", name, [cell.name for cell in cells])
    return next(cell for cell in cells if cell.name == name)


def matrix(cells: Sequence[Cell], recorded: Collection[str] = ()) -> str:
    """The matrix as text: a run a line, what it overrides, its state and its steps.

    Args:
        cells: the runs.
        recorded: names of those that are finished in an earlier record alone.
    """
    rows = [("run", "state", "steps", "overrides")]
    for cell in cells:
        if cell.name in recorded:
            rows.append((cell.name, "recorded", f"{cell.steps}/{cell.steps}", " ".join(cell.overrides)))
            continue
        at = progress(cell)
        steps = f"{at.steps}/{cell.steps}"
        why = f" ({at.difference})" if at.difference else ""
        rows.append((cell.name, at.state + why, steps, " ".join(cell.overrides)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]) for row in rows]
    return "\n".join(lines)
