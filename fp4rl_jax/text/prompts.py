"""Prompts as one rectangle: left-padded ids and their mask, at a width that never changes."""

from collections.abc import Sequence

import numpy as np

from fp4rl_jax.text.chat import Message
from fp4rl_jax.text.tokenizer import Tokenizer

Prompt = str | Sequence[Message]


class PromptError(ValueError):
    """A prompt that cannot be encoded; the message names it."""


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], *, width: int, names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes prompts into one left-padded rectangle of a fixed width.

    Args:
        tokenizer: the model's tokenizer.
        prompts: P prompts; a string is encoded as it stands, a list of messages goes through the
            chat template and ends where the assistant begins.
        width: columns of the result, in tokens.
        names: what errors call each prompt (a task's item ids); its index by default.

    Returns:
        tokens [P, width] int32, and mask [P, width] bool, True on real tokens; a prompt's last
        token is in the last column.

    Raises:
        PromptError: a prompt is empty or longer than `width`; the message names it.
    """
    rows = [
        tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        for prompt in prompts
    ]
    return pad_left(rows, width=width, pad_id=tokenizer.pad_id, names=names)


def pad_left(
    rows: Sequence[Sequence[int]], *, width: int, pad_id: int, names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Puts rows of ids right-aligned into [P, width]; arguments and errors as `encode_prompts`."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    mask = np.zeros((len(rows), width), bool)
    for index, row in enumerate(rows):
        name = repr(names[index]) if names is not None else str(index)
        if not row:
            raise PromptError(f"prompt {name} is empty: it has no tokens")
        if len(row) > width:
            raise PromptError(
                f"prompt {name} has {len(row)} tokens, but the prompt width is {width}: shorten it or "
                "widen it (in a run: rollout.prompt_width)"
            )
        tokens[index, width - len(row) :] = row
        mask[index, width - len(row) :] = True
    return tokens, mask
