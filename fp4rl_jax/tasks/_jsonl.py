"""JSON Lines files as random-access items, read when asked for; memory is 8 bytes a row."""

import dataclasses
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp4rl_jax.tasks._base import Item, unit_hash

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a JSON Lines file that were kept, each made an item when asked for.

    Attributes:
        path: the file.
        offsets: where each kept row starts, in bytes.
        to_item: makes an item of a row.
    """

    path: Path
    offsets: "array[int]"
    to_item: Callable[[Row], Item]

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> Item:
        with self.path.open("rb") as file:
            file.seek(self.offsets[index])
            return self.to_item(json.loads(file.readline()))


def split_rows(
    train: str,
    held_out: str,
    *,
    keys: tuple[str, str],
    to_item: Callable[[Row], Item],
    eval_share: float,
) -> tuple[Rows, Rows]:
    """Reads a training and a held-out file, once, and makes them disjoint by item key.

    A training row whose key is also held out is dropped. Without a held-out file, the keys whose
    hash is below `eval_share` are held out. A repeated key stays on its side.

    Args:
        train, held_out: paths; `held_out` may be "".
        keys: of the task's configuration, which give them.
        to_item: makes an item of a row, or raises ValueError saying what is wrong with it.
        eval_share: used only without a held-out file.

    Raises:
        FileNotFoundError: a path that is no file, with its key and where it was looked for.
        ValueError: a line that is no JSON object or that `to_item` refuses (named file:line), or a
            side without a row.
    """
    for key, given in zip(keys, (train, held_out), strict=True):
        if given and not Path(given).is_file():
            raise FileNotFoundError(
                f"task.{key} = {given!r}: expected a file, there is none at {Path(given).resolve()}"
            )
    train_path = Path(train)
    if held_out:
        eval_path = Path(held_out)
        eval_rows = list(_scan(eval_path, to_item))
        eval_keys = {key for _, key in eval_rows}
        train_rows = [row for row in _scan(train_path, to_item) if row[1] not in eval_keys]
    else:
        eval_path, rows = train_path, list(_scan(train_path, to_item))
        eval_rows = [row for row in rows if unit_hash(row[1]) < eval_share]
        train_rows = [row for row in rows if unit_hash(row[1]) >= eval_share]
    for side, path, rows in (("train", train_path, train_rows), ("eval", eval_path, eval_rows)):
        if not rows:
            raise ValueError(f"{path}: no row is left for {side} ({len(eval_rows)} rows are held out)")
    return (
        Rows(path=train_path, offsets=array("q", [at for at, _ in train_rows]), to_item=to_item),
        Rows(path=eval_path, offsets=array("q", [at for at, _ in eval_rows]), to_item=to_item),
    )


def text_field(row: Row, *names: str) -> str:
    """The first of `names` that is in `row`, a non-empty string or a number, as text.

    Raises:
        ValueError: none of them is there, or it is something else.
    """
    for name in names:
        if name in row:
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
                raise ValueError(f"{name!r} is {value!r}, expected text")
            return str(value)
    raise ValueError(f"no {' or '.join(map(repr, names))} among its fields {sorted(row)}")


def text_key(text: str) -> str:
    """`text` with its white space made uniform: what identifies a problem given in words."""
    return " ".join(text.split())


def _scan(path: Path, to_item: Callable[[Row], Item]) -> Iterator[tuple[int, str]]:
    """(byte offset, item key) of every row; blank lines are skipped."""
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
                    yield offset, to_item(row).key
                except ValueError as error:  # JSONDecodeError is one
                    raise ValueError(f"{path}:{number}: {error}") from error
            offset += len(line)
