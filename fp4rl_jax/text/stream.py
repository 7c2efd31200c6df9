"""Text of a completion while it is being sampled, one id at a time."""

import dataclasses

from fp4rl_jax.text.tokenizer import Special, Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder prints for the start of a multi-byte character


@dataclasses.dataclass(kw_only=True)
class StreamDecoder:
    """Turns ids into text as they come; the pieces joined equal `tokenizer.decode` of all ids.

    Bytes of a character that is still incomplete are held back until the rest arrives or `finish`
    is called.

    Attributes:
        tokenizer: the model's tokenizer.
        special: "skip" leaves special tokens out, "keep" spells them out.
    """

    tokenizer: Tokenizer
    special: Special = "skip"
    _ids: list[int] = dataclasses.field(default_factory=list)
    _shown: str = ""

    def push(self, token_id: int) -> str:
        """Adds one id and returns the text that became certain ("" while bytes are missing)."""
        self._ids.append(token_id)
        text = self.tokenizer.decode(self._ids, special=self.special).rstrip(_UNFINISHED)
        fresh = text[len(self._shown) :]
        self._shown += fresh
        return fresh

    def finish(self) -> str:
        """Returns what was held back, undecodable bytes as replacement characters, and starts over."""
        text = self.tokenizer.decode(self._ids, special=self.special)
        fresh = text[len(self._shown) :]
        self._ids, self._shown = [], ""
        return fresh
