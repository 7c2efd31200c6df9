"""The tokenizer: text to ids and back, chat rendering, and the ids that end a completion.

Token ids are the currency of training: what the sampler drew is what the trainer scores. Text is
made of ids only to be read (by a reward or a person) and is never encoded again on that road.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tokenizers

from fp4rl_jax.text import chat

Special = Literal["keep", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A `tokenizers` pipeline and what the model's files say around it.

    Attributes:
        backend: the `tokenizers` pipeline (normalizer, splitter, merges, post-processor, decoder).
        bos_id: id of the beginning-of-sequence token, or None.
        eos_id: id of the end-of-sequence token, or None.
        pad_id: id written into masked columns; where the files name none, `eos_id` or 0 (a mask
            always hides it).
        stop_ids: every id that ends a completion, ascending (the tokenizer's eos and those of
            `generation_config.json`).
        special_tokens: the named special tokens as text ("bos_token" -> "<|im_start|>", ...), which
            chat templates use.
        chat_template: jinja2 text, or None.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    stop_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with the special tokens that the pipeline adds (transformers' `tok(text)`)."""
        return self.backend.encode(text, add_special_tokens=True).ids

    def encode_chat(
        self,
        messages: Sequence[chat.Message],
        *,
        ending: chat.Ending = "assistant",
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a rendered chat (see `render_chat`); the template alone decides on special tokens."""
        rendered = self.render_chat(messages, ending=ending, variables=variables)
        return self.backend.encode(rendered, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, special: Special = "skip") -> str:
        """Text of `ids`, to be read and never encoded again; `special="keep"` spells special tokens out.

        An id that stands for no token decodes to nothing: an embedding may have more rows than the
        tokenizer has ids, and a sampler may draw one of them.

        Raises:
            ValueError: an id is negative.
        """
        values = [int(i) for i in ids]
        if values and min(values) < 0:
            raise ValueError(f"token id {min(values)} is negative")
        return self.backend.decode(values, skip_special_tokens=special == "skip")

    def render_chat(
        self,
        messages: Sequence[chat.Message],
        *,
        ending: chat.Ending = "assistant",
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a chat through the model's template (see `chat.render`).

        Raises:
            ChatTemplateError: the model ships no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise chat.ChatTemplateError(
                "this tokenizer has no chat template (tokenizer_config.json and chat_template.jinja "
                "give none): pass plain text prompts"
            )
        known = {**self.special_tokens, **(variables or {})}
        return chat.render(self.chat_template, messages, ending=ending, variables=known)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer that needs no file: 256 bytes and three ChatML tokens, 259 ids.

    Id b is the byte b; 256 is <|im_start|> (bos), 257 <|im_end|> (eos, stop) and 258 <|pad|>. For
    tiny random models in tests and examples.
    """
    alphabet = _byte_alphabet()
    model = tokenizers.models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    names = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return Tokenizer(
        backend=backend,
        bos_id=256,
        eos_id=257,
        pad_id=258,
        stop_ids=(257,),
        special_tokens=dict(zip(("bos_token", "eos_token", "pad_token"), names, strict=True)),
        chat_template=_CHATML,
    )


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return [table[b] for b in range(256)]
