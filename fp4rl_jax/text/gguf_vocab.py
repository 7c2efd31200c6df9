"""A tokenizer rebuilt from the metadata of a GGUF file.

GGUF stores the vocabulary, the merges and a *name* of the splitting rule (`tokenizer.ggml.pre`).
`_SPLITTERS` spells the rules out; each is the pipeline of the `tokenizer.json` that the model
family publishes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from fp4rl_jax.arrays import check_name
from fp4rl_jax.text.tokenizer import Tokenizer

#: `tokenizer.ggml.token_type` values.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level(regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(False)])


def _by_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])


#: splitting rule -> (splitter, whether text is NFC-normalised first, whether whole words skip merges)
_SPLITTERS: dict[str, tuple[Callable[[], pre_tokenizers.PreTokenizer], bool, bool]] = {
    "gpt-2": (lambda: _byte_level(True), False, False),
    "llama-bpe": (lambda: _by_pattern(_LLAMA3_SPLIT), False, True),
    "qwen2": (lambda: _by_pattern(_QWEN2_SPLIT), True, False),
    "smollm": (_by_digits, False, False),
}


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds the tokenizer that a GGUF file describes.

    Args:
        metadata: the file's key/value pairs, decoded (`tokenizer.ggml.*`, `tokenizer.chat_template`).

    Raises:
        ValueError: a key is missing, or names a model or a splitting rule that is not implemented;
            the message gives the key, its value and what is known.
    """
    check_name("tokenizer.ggml.model", _need(metadata, "model"), ("gpt2",))
    backend = _pipeline(metadata)
    tokens = _need(metadata, "tokens")
    ids = {
        kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "unknown", "padding")
    }
    ids = {kind: _in_range(kind, value, len(tokens)) for kind, value in ids.items() if value is not None}
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        _prepend(backend, tokens[ids["bos"]], ids["bos"])
    eos = ids.get("eos")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        backend=backend,
        bos_id=ids.get("bos"),
        eos_id=eos,
        pad_id=ids.get("padding", eos if eos is not None else 0),
        stop_ids=() if eos is None else (eos,),
        special_tokens={names[kind]: tokens[index] for kind, index in ids.items()},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _pipeline(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens, kinds = _need(metadata, "tokens"), _need(metadata, "token_type")
    if len(tokens) != len(kinds):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _need(metadata, "merges")]
    splitter, nfc, whole_words = _SPLITTERS[
        check_name("tokenizer.ggml.pre", _need(metadata, "pre"), _SPLITTERS)
    ]
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)}, merges=merges, ignore_merges=whole_words
    )
    backend = tokenizers.Tokenizer(model)
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter()
    backend.decoder = decoders.ByteLevel()
    named = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens([_added(token) for token, kind in named if kind in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([_added(token) for token, kind in named if kind == _USER_DEFINED])
    return backend


def _added(token: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False)


def _prepend(backend: tokenizers.Tokenizer, token: str, token_id: int) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


def _need(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ValueError(f"GGUF metadata has no {key}: the file carries no complete tokenizer")
    return metadata[key]


def _in_range(kind: str, value: int, size: int) -> int:
    if not 0 <= value < size:
        raise ValueError(f"tokenizer.ggml.{kind}_token_id is {value}, outside the {size} tokens of the file")
    return value
