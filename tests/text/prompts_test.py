"""Left-padded rectangles of ids."""

import numpy as np
import pytest

from fp4rl_jax import text


def test_prompts_are_right_aligned_with_their_mask() -> None:
    tokens, mask = text.encode_prompts(text.byte_tokenizer(), ["ab", "abcd"], width=5)
    assert tokens.dtype == np.int32 and mask.dtype == bool
    np.testing.assert_array_equal(tokens, [[258, 258, 258, 97, 98], [258, 97, 98, 99, 100]])
    np.testing.assert_array_equal(mask, [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])


def test_messages_go_through_the_chat_template() -> None:
    tokenizer = text.byte_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    tokens, mask = text.encode_prompts(tokenizer, [messages], width=40)
    assert tokens[0][mask[0]].tolist() == tokenizer.encode_chat(messages)
    assert tokenizer.decode(tokens[0][mask[0]].tolist(), special="keep").endswith("<|im_start|>assistant\n")


def test_a_prompt_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match="prompt 1 has 6 tokens, but the prompt width is 5"):
        text.encode_prompts(text.byte_tokenizer(), ["ab", "abcdef"], width=5)
    with pytest.raises(ValueError, match="prompt 'sum-17' has 6 tokens"):
        text.encode_prompts(text.byte_tokenizer(), ["abcdef"], width=5, names=["sum-17"])


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        text.encode_prompts(text.byte_tokenizer(), [""], width=5)
