"""Which problems a step trains on: deterministic, resumable, the same for any number of hosts."""

from fp4rl_jax.data.prompts import Prompts, eval_batches

__all__ = ["Prompts", "eval_batches"]
