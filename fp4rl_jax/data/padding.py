"""Token lists to the rectangular, left-padded prompts that the sampler takes."""

from collections.abc import Sequence

import numpy as np


def left_pad(prompts: Sequence[Sequence[int]], *, width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts on the left so that the last token of each is in the last column.

    Args:
        prompts: P token lists, none empty.
        width: columns of the result.
        pad_id: the token written where the mask is False.

    Returns:
        (tokens [P, width] int32, mask [P, width] bool, True on real tokens).

    Raises:
        ValueError: a prompt is empty or longer than `width`; the message gives its index and length.
    """
    tokens = np.full((len(prompts), width), pad_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= width:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens, expected 1 to {width}")
        tokens[index, width - len(prompt) :] = prompt
        mask[index, width - len(prompt) :] = True
    return tokens, mask
