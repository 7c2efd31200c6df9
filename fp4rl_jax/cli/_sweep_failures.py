"""The failed runs of a sweep, and which of them the next call leaves alone."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from fp4rl_jax.cli._sweep_matrix import Cell, progress
from fp4rl_jax.config import as_dict
from fp4rl_jax.runs import exit_codes
from fp4rl_jax.runs.directory import config_fingerprint
from fp4rl_jax.runs.files import dump_json, read_json, write_atomically

FAILURES = "failures.json"
#: Failures that lie outside of an arm: the next call tries again.
PASSING = (exit_codes.RUN, exit_codes.STORAGE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ended before its end.

    Attributes:
        code: as `fp4rl train` would have returned, or 128 and the number of the signal that ended it.
        message: its line.
        fingerprint: of the configuration that failed.
    """

    code: int
    message: str
    fingerprint: str


def failure(cell: Cell, *, code: int, message: str) -> Failure:
    """The failure of a cell as it is configured now."""
    return Failure(code=code, message=message, fingerprint=config_fingerprint(as_dict(cell.config)))


def failures(cells: Sequence[Cell], root: Path) -> dict[str, Failure]:
    """The kept failures of these cells, by run, less those of a cell that was changed or finished since."""
    found = read_json(root / FAILURES) if (root / FAILURES).exists() else {}
    kept = {name: Failure(**one) for name, one in found.items()}
    unfinished = [cell for cell in cells if cell.name in kept and progress(cell).state != "done"]
    prints = {cell.name: config_fingerprint(as_dict(cell.config)) for cell in unfinished}
    return {name: one for name, one in kept.items() if prints.get(name) == one.fingerprint}


def forget_failures(root: Path) -> None:
    """Lets every failed run be tried again."""
    (root / FAILURES).unlink(missing_ok=True)


def keep(failed: Mapping[str, Failure], root: Path) -> None:
    """Keeps the failures that the next call would only repeat; see `forget_failures`."""
    kept = {name: dataclasses.asdict(one) for name, one in failed.items() if one.code not in PASSING}
    write_atomically(root / FAILURES, dump_json(kept))
