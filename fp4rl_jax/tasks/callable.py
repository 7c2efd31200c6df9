"""Your own reward function and prompts: `module:function` and a JSON Lines file (docs/TASKS.md).

    # my_reward.py
    def reward(item, completion):
        return 1.0 if completion.strip() == item.row["answer"] else 0.0

`item` is a `fp4rl_jax.tasks.Item`: `.prompt`, `.messages`, `.answer`, and `.row` with all columns.
The function returns a finite number (1.0 and more counts as correct), a pair (number, parts) or a
`Reward`, with the same parts every time. Anything else, None and NaN included, stops the run with
an error that names the prompt; so does an exception.

Prompts: rows with `prompt` (text) or `messages` (a list of {"role", "content"}), and optionally
`answer`. They come from a file (`train = "prompts.jsonl"`) or from code (`train =
"my_reward:train_rows"`, a function without arguments that returns a list of such rows).
"""

import dataclasses
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.tasks._base import (
    Item,
    Reward,
    Source,
    Task,
    as_reward,
    naming,
    require_set,
    require_share,
    unit_hash,
    user_message,
)
from fp4rl_jax.tasks._jsonl import Row, split_rows, text_field, text_key

_REWARD = 'reward = "my_reward.py:reward", a function of an item and a completion'
_TRAIN = 'train = "prompts.jsonl", or train = "my_reward.py:rows", a function that returns a list of rows'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Where the function and the prompts are.

    Attributes:
        reward: `module:function`, or `path/to/file.py:function`.
        train: a .jsonl path, or `module:function` (or `file.py:function`) that returns rows.
        eval: the same for held-out prompts; training rows that are also here are dropped.
            Empty: `eval_share` of the prompts of `train` are held out.
        eval_share: see `eval`, 0 <= share < 1.
    """

    reward: str = ""
    train: str = ""
    eval: str = ""
    eval_share: float = 0.1

    def __post_init__(self) -> None:
        require_share(eval_share=self.eval_share)


def example_config(folder: Path) -> Config:
    """A reward function and six prompts, written under `folder`."""
    code = "def reward(item, completion):\n    return float(completion == item.answer)\n"
    (folder / "example_reward.py").write_text(code)
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in ("a", "b", "c", "d", "e", "f")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[3:]))
    return Config(
        reward=f"{folder / 'example_reward.py'}:reward",
        train=str(folder / "prompts.jsonl"),
        eval=str(folder / "held_out.jsonl"),
    )


def build(config: Config) -> Task:
    """Builds the task.

    Raises:
        ValueError: `reward` or `train` is not set, or names nothing that can be called (with the
            nearest name), that takes these arguments, or that Python finds and can import; a row has
            no prompt, or a side has no row.
        FileNotFoundError: a path that does not exist.
    """
    require_set("reward", config.reward, example=_REWARD)
    require_set("train", config.train, example=_TRAIN)
    reward = _resolve("reward", config.reward)
    _require_arguments("reward", config.reward, reward, ("item", "completion"))
    scorer = _SameParts(reward)
    train, held_out = _sources(config)
    return Task(name="callable", train=train, eval=held_out, scorer=scorer)


class _SameParts:
    """A reward function that must name the same parts every time, so that they can be averaged."""

    def __init__(self, function: Callable[[Item, str], Any]):
        self._function = function
        self._parts: list[str] | None = None

    def __call__(self, item: Item, completion: str) -> Reward:
        reward = as_reward(self._function(item, completion))
        parts = sorted(reward.parts)
        self._parts = parts if self._parts is None else self._parts
        if parts != self._parts:
            raise ValueError(f"the reward has the parts {parts}, and had before {self._parts}")
        return reward


def _sources(config: Config) -> tuple[Source, Source]:
    from_code = [":" in path and not path.endswith(".jsonl") for path in (config.train, config.eval)]
    if not any(from_code):
        return split_rows(
            config.train, config.eval, keys=("train", "eval"), to_item=_to_item, eval_share=config.eval_share
        )
    if config.eval and not all(from_code):
        raise ValueError(
            f"task.train is {config.train!r} and task.eval {config.eval!r}: "
            "expected both files or both functions"
        )
    train = _called("train", config.train)
    held_out = _called("eval", config.eval) if config.eval else []
    if not config.eval:
        held_out = [item for item in train if unit_hash(item.key) < config.eval_share]
    keys = {item.key for item in held_out}
    train = [item for item in train if item.key not in keys]
    for side, items in (("train", train), ("eval", held_out)):
        if not items:
            raise ValueError(f"{config.train}: no row is left for {side} ({len(held_out)} are held out)")
    return train, held_out


def _called(field: str, where: str) -> list[Item]:
    function = _resolve(field, where)
    _require_arguments(field, where, function, ())
    with naming(f"task.{field} {where!r}"):
        rows = function()
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError(f"task.{field} {where!r} returned {type(rows).__name__}, expected a list of rows")
    items = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"task.{field} {where!r}: row {index} is {type(row).__name__}, expected a dict")
        try:
            items.append(_to_item(dict(row)))
        except ValueError as error:
            raise ValueError(f"task.{field} {where!r}: row {index}: {error}") from error
    return items


def _to_item(row: Row) -> Item:
    from_text = "messages" not in row
    messages = user_message(text_field(row, "prompt")) if from_text else _messages(row["messages"])
    key = text_key("\n".join(f"{m['role']}: {m['content']}" for m in messages))
    answer = text_field(row, "answer") if "answer" in row else ""
    return Item(key=key, messages=messages, answer=answer, row=row)


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    shaped = isinstance(value, list) and value and all(isinstance(m, dict) for m in value)
    if not shaped or not all(isinstance(m.get(k), str) for m in value for k in ("role", "content")):
        raise ValueError(f"'messages' is {value!r}, expected a list of {{'role': ..., 'content': ...}}")
    return tuple(value)


def _resolve(field: str, where: str) -> Callable[..., Any]:
    """The callable at `module:name` or `file.py:name`."""
    place, colon, name = where.rpartition(":")
    if not (place and colon and name):
        raise ValueError(f"task.{field} is {where!r}, expected 'module:function' or 'file.py:function'")
    module = _module_of_file(field, Path(place)) if place.endswith(".py") else _module_of_name(field, place)
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise unknown_name(f"function in {place} (for {field})", name, known)
    return found


def _require_arguments(
    field: str, where: str, function: Callable[..., Any], arguments: tuple[str, ...]
) -> None:
    """Refuses a function that cannot be called with `arguments`; one that hides its signature passes."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        expected = f"({', '.join(arguments)})"
        raise ValueError(
            f"task.{field} {where!r} takes {signature}, expected a function of {expected}: {error}"
        ) from error


def _module_of_name(field: str, name: str) -> Any:
    with naming(f"task.{field}: importing {name}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                raise  # the module was found, and misses another
    raise ValueError(
        f"task.{field}: Python finds no module {missing!r} (a file is written 'path/to/file.py:function')"
    )


def _module_of_file(field: str, path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"task.{field}: no file {path} (looked for it from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    with naming(f"task.{field}: importing {path}"):
        spec.loader.exec_module(module)
    return module
