"""Tokenizers, chat templates and prompts: host Python and numpy, no jax."""

from fp4rl_jax.text.chat import ChatTemplateError, Message
from fp4rl_jax.text.gguf_vocab import from_gguf_metadata
from fp4rl_jax.text.hf import load_tokenizer, save_tokenizer
from fp4rl_jax.text.prompts import Prompt, PromptError, encode_prompts, pad_left
from fp4rl_jax.text.stream import StreamDecoder
from fp4rl_jax.text.tokenizer import Tokenizer, byte_tokenizer

__all__ = [
    "ChatTemplateError",
    "Message",
    "Prompt",
    "PromptError",
    "StreamDecoder",
    "Tokenizer",
    "byte_tokenizer",
    "encode_prompts",
    "from_gguf_metadata",
    "load_tokenizer",
    "pad_left",
    "save_tokenizer",
]
