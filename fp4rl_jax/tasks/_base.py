"""The task contract: items, rewards, and the checks around every reward function."""

import dataclasses
import hashlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self


class RewardError(ValueError):
    """A reward could not be computed or is not a finite number; the message names the prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One problem.

    Attributes:
        key: what identifies the problem within its task; equal problems have equal keys.
        messages: the chat so far, each `{"role": ..., "content": ...}`; the tokenizer's chat
            template is applied to it later.
        answer: a completion that earns full marks, or "" where none is known.
        row: further columns of the item's source, for the reward function.
    """

    key: str
    messages: tuple[Mapping[str, str], ...]
    answer: str = ""
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prompt(self) -> str:
        """The content of the last message."""
        return self.messages[-1]["content"]


class Source(Protocol):
    """Random-access items: a list, or something that makes item i when asked for it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """The reward of one completion.

    Attributes:
        value: what training maximises, finite.
        correct: whether the answer is right: what pass@k counts, whatever else is rewarded.
        parts: the value's terms by name, before their weights, for the logs.
    """

    value: float
    correct: bool
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts and their reward.

    Attributes:
        name: the task's name, for messages and logs.
        train, eval: random-access sources of items without a common problem.
        scorer: (item, completion text) to a `Reward`, or a number, or (number, parts); without a
            `Reward` the answer counts as correct from 1.0 on.
    """

    name: str
    train: Source
    eval: Source
    scorer: Callable[[Item, str], Any]

    def reward(self, item: Item, completion: str) -> Reward:
        """The checked reward of `completion`.

        Raises:
            RewardError: the scorer raised (chained), or returned None, or something that is not
                a finite number; the message names the task, the prompt and the completion, and where
                in the scorer's own file it was raised.
        """
        where = f"task {self.name!r}, prompt {_short(item.prompt)}, completion {_short(completion)}"
        with naming(where, kind=RewardError):
            return as_reward(self.scorer(item, completion))

    def rewards(self, items: Iterable[Item], completions: Iterable[str]) -> list[Reward]:
        """The rewards of as many completions as items, in order."""
        return [self.reward(item, text) for item, text in zip(items, completions, strict=True)]


def weighted(correct: float, form: float, *, format_weight: float) -> Reward:
    """(1 - format_weight) * correct + format_weight * form, both in [0, 1]; the best is 1."""
    value = (1.0 - format_weight) * correct + format_weight * form
    return Reward(value=value, correct=correct == 1.0, parts={"correct": correct, "format": form})


def require_share(**fields: float) -> None:
    """Raises a ValueError naming the first field that is not in [0, 1)."""
    for name, value in fields.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}, expected 0 <= {name} < 1")


def require_count(**fields: int) -> None:
    """Raises a ValueError naming the first field that is below 1."""
    for name, value in fields.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")


def require_set(field: str, value: str, *, example: str) -> None:
    """Raises a ValueError that says how to set `task.field` where `value` is empty."""
    if not value:
        raise ValueError(f"task.{field} is not set: in the [task] section of the TOML file write {example}")


def require_positive(**fields: float) -> None:
    """Raises a ValueError naming the first field that is not a finite number above 0."""
    for name, value in fields.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}, expected a finite number above 0")


def require_package(name: str, *, task: str) -> None:
    """Raises a ModuleNotFoundError that says how to install the optional package `name`."""
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"task {task!r} needs {name}: pip install 'fp4rl_jax[tasks]'", name=name)


def unit_hash(text: str, *, seed: int = 0) -> float:
    """A number in [0, 1) that depends on `text` and `seed` alone, equal on every machine."""
    digest = hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def user_message(content: str) -> tuple[Mapping[str, str], ...]:
    """A chat of one user message."""
    return ({"role": "user", "content": content},)


class naming:
    """Context that turns any error of a function that is not ours into one of `kind` that says where.

    Raises:
        kind: `where`, what was raised, and the file and line of the first call outside this project.
    """

    def __init__(self, where: str, *, kind: type[ValueError] = ValueError):
        self._where, self._kind = where, kind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            text = f"{self._where}: {type(error).__name__}: {error}{_raised_at(trace)}"
            raise self._kind(text) from error


def _raised_at(trace: TracebackType | None) -> str:
    """ " (file.py, line 3)" of the first frame outside this project and Python's import system, or ""."""
    ours = (str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent), "<frozen importlib")
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(ours)]
    return f" ({Path(frames[0].filename).name}, line {frames[0].lineno})" if frames else ""


def as_reward(score: Any) -> Reward:
    """What a scorer returned as a checked `Reward`: see `Task`.

    Raises:
        TypeError, ValueError: it is None, text or otherwise no finite number.
    """
    if isinstance(score, tuple) and len(score) == 2:
        value, parts = score
        score = Reward(value=_number("reward", value), correct=value >= 1.0, parts=dict(parts))
    elif not isinstance(score, Reward):
        value = _number("reward", score)
        score = Reward(value=value, correct=value >= 1.0)
    parts = {name: _number(f"part {name!r}", value) for name, value in score.parts.items()}
    return dataclasses.replace(score, value=_number("reward", score.value), parts=parts)


def _number(what: str, value: Any) -> float:
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"{what} is {value!r}, expected a finite number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, expected a finite number")
    return number


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
