"""Which problems a step trains on: deterministic, resumable, the same for any number of hosts."""

from fp4rl_jax.data.prompts import Prompts, eval_batches
from fp4rl_jax.data.supervised import (
    Examples,
    SftConfig,
    chat_items,
    encode_examples,
    pack_examples,
    require_answers,
)

__all__ = [
    "Examples",
    "Prompts",
    "SftConfig",
    "chat_items",
    "encode_examples",
    "eval_batches",
    "pack_examples",
    "require_answers",
]
