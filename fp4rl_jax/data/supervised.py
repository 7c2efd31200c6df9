"""Examples for supervised training: chats whose last turn is learned, as rectangles of ids.

A prompt ends where the assistant begins, and the completion is the answer's own ids with the stop token
after them: exactly what a sampler would have to draw. The loss falls on the completion alone.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4rl_jax.tasks import Item
from fp4rl_jax.text import PromptError, Tokenizer, encode_prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
    """The `sft` section: what `fp4rl sft` learns from.

    Attributes:
        path: a JSON Lines file of `{"messages": [{"role", "content"}, ...]}` whose last message is the
            assistant's; none takes the task's own problems with their answers.
        pack_width: columns of a row that examples are packed into one after the other, each seen by
            its own tokens alone; none gives every example a padded row of its own.
    """

    path: str | None = None
    pack_width: int | None = None

    def __post_init__(self) -> None:
        if self.pack_width is not None and self.pack_width < 2:
            raise ValueError(f"pack_width is {self.pack_width}, expected at least 2 columns, or none")


def chat_items(path: str) -> list[Item]:
    """The rows of a chat file as items: the messages before the last, and the last as the answer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is not of this form, named file:line, or no line at all.
    """
    items = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                items.append(_item(json.loads(line), key=f"{path}:{number}"))
            except ValueError as error:  # JSONDecodeError is one
                raise ValueError(f"{path}:{number}: {error}") from error
    if not items:
        raise ValueError(f"{path}: it has no row")
    return items


def _item(row: Any, *, key: str) -> Item:
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or len(messages) < 2:
        raise ValueError("expected an object with 'messages', a list of at least two")
    for message in messages:
        if not (
            isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        ):
            raise ValueError(f"message {message!r}: expected 'role' and 'content' as text")
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise ValueError(f"the last message is {messages[-1]!r}: expected the assistant's, not empty")
    return Item(key=key, messages=tuple(messages[:-1]), answer=messages[-1]["content"])


def require_answers(items: Sequence[Item]) -> None:
    """Raises ValueError: the first item has no answer, so the task has none to learn from."""
    if not items[0].answer:
        raise ValueError(
            f"problem {items[0].key!r} has no answer: this task gives none, name a file in sft.path"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """A batch of examples in the layout of `batch.py`, every row a group of its own.

    Attributes:
        tokens: [B, T] int32; T is the prompt width and the completion width together, or of packed rows.
        token_mask: [B, T] bool, real tokens. loss_mask: [B, T] bool, the completion's.
        segments: [B, T] int32 of packed rows (`TrainBatch`), or None.
    """

    tokens: np.ndarray
    token_mask: np.ndarray
    loss_mask: np.ndarray
    segments: np.ndarray | None = None

    @property
    def count(self) -> int:
        """How many examples there are."""
        return len(self.tokens) if self.segments is None else int(self.segments.max(axis=1).sum())


def encode_examples(
    tokenizer: Tokenizer, items: Sequence[Item], *, prompt_width: int, completion_width: int
) -> Examples:
    """Encodes items: prompts left-padded, answers and a stop token right-padded.

    Raises:
        PromptError: a prompt or a completion is longer than its width; the message names the item.
        ValueError: the tokenizer has no token that ends a completion.
    """
    prompts, prompt_mask = encode_prompts(
        tokenizer, [item.messages for item in items], width=prompt_width, names=[item.key for item in items]
    )
    after = np.full((len(items), completion_width), tokenizer.pad_id, np.int32)
    real = np.zeros(after.shape, bool)
    for row, item in enumerate(items):
        ids = _completion(tokenizer, item)
        if len(ids) > completion_width:
            raise PromptError(
                f"the answer of {item.key!r} has {len(ids)} tokens, its stop token included, but "
                f"rollout.max_new_tokens is {completion_width}"
            )
        after[row, : len(ids)] = ids
        real[row, : len(ids)] = True
    return Examples(
        tokens=np.concatenate([prompts, after], axis=1),
        token_mask=np.concatenate([prompt_mask, real], axis=1),
        loss_mask=np.concatenate([np.zeros_like(prompt_mask), real], axis=1),
    )


def _completion(tokenizer: Tokenizer, item: Item) -> list[int]:
    """The answer's ids and the token that ends it."""
    if not tokenizer.stop_ids:
        raise ValueError("the tokenizer names no token that ends a completion")
    stop = tokenizer.eos_id if tokenizer.eos_id in tokenizer.stop_ids else tokenizer.stop_ids[0]
    return [*tokenizer.backend.encode(item.answer, add_special_tokens=False).ids, stop]


def pack_examples(
    tokenizer: Tokenizer, draw: Callable[[], Item], undo: Callable[[], None], *, rows: int, width: int
) -> Examples:
    """Fills rows with examples, each into the first row that has room, until one fits nowhere.

    Args:
        tokenizer: the model's.
        draw: the next item.
        undo: puts the last drawn item back.
        rows, width: of the result.

    Raises:
        PromptError: an example is longer than `width`; the message names it.
    """
    tokens = np.full((rows, width), tokenizer.pad_id, np.int32)
    segments = np.zeros((rows, width), np.int32)
    loss_mask = np.zeros((rows, width), bool)
    used, held = np.zeros(rows, int), np.zeros(rows, int)
    while True:
        item = draw()
        prompt, answer = tokenizer.encode_chat(item.messages), _completion(tokenizer, item)
        ids = [*prompt, *answer]
        if len(ids) > width:
            raise PromptError(f"example {item.key!r} has {len(ids)} tokens, but sft.pack_width is {width}")
        free = np.flatnonzero(used + len(ids) <= width)
        if not free.size:
            undo()
            return Examples(tokens=tokens, token_mask=segments > 0, loss_mask=loss_mask, segments=segments)
        row = int(free[0])
        begin, end = int(used[row]), int(used[row]) + len(ids)
        held[row] += 1
        tokens[row, begin:end], segments[row, begin:end] = ids, held[row]
        loss_mask[row, begin + len(prompt) : end] = True
        used[row] = end
