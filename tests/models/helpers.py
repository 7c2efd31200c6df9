"""Batches and sides that the model tests share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models
from fp4rl_jax.arrays import Array
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Side, SideSpec


def plain_side(config: ModelConfig, *, dtype: str = "float32", order: Any = "free") -> Side:
    """A side that quantizes nothing."""
    return Side(specs=SideSpec().resolve(models.sites(config)), dtype=dtype, order=order)


def ragged_batch(
    rng: np.random.Generator, config: ModelConfig, *, prompts: int, group: int, prompt_width: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask [B, prompt_width + width]: prompts left-padded, completions right-padded.

    The first prompt is one token long and the first completion fills its columns; padding columns
    hold random tokens, so that reading them changes results.
    """
    rows = prompts * group
    tokens = rng.integers(0, config.vocab_size, (rows, prompt_width + width)).astype(np.int32)
    lengths = rng.integers(1, prompt_width + 1, prompts)
    lengths[0] = 1
    ends = rng.integers(1, width + 1, rows)
    ends[0] = width
    tokens[:, :prompt_width] = np.repeat(tokens[::group, :prompt_width], group, axis=0)
    before = np.arange(prompt_width)[None] >= prompt_width - np.repeat(lengths, group)[:, None]
    after = np.arange(width)[None] < ends[:, None]
    return tokens, np.concatenate([before, after], axis=1)


def decode_logprobs(
    fused: Any, tokens: np.ndarray, mask: np.ndarray, *, prompt_width: int, group: int, config: ModelConfig,
    side: Side, temperature: float,
) -> Array:  # fmt: skip
    """Log-probs [B, T] the way the sampler finds them: prefill, then one column at a time."""
    rows, total = tokens.shape
    width = total - prompt_width
    prompt_mask = jnp.asarray(mask[::group, :prompt_width])
    out = models.forward(
        fused, jnp.asarray(tokens[::group, :prompt_width]), config=config, side=side,
        positions=models.positions_of(prompt_mask), token_mask=prompt_mask,
    )  # fmt: skip
    prefix, hidden = out.kv, jnp.repeat(out.hidden[:, -1], group, axis=0)
    starts = jnp.repeat(jnp.sum(prompt_mask, axis=1), group)
    cache = models.new_cache(config, num_rows=rows, completion_width=width, dtype=side.dtype)
    after = jnp.asarray(tokens[:, prompt_width:])

    def emit(hidden: Array, column: Array | int) -> Array:
        scores = models.tempered(models.logits(fused, hidden, order=side.order), temperature)
        return models.pick_logprobs(scores, after[:, column], order=side.order)

    def step(cache: Any, column: Array) -> Any:
        out = models.forward(
            fused, after[:, column][:, None], config=config, side=side, positions=(starts + column)[:, None],
            token_mask=jnp.ones((rows, 1), bool), prefix=prefix, prefix_mask=prompt_mask, cache=cache,
            cache_index=column,
        )  # fmt: skip
        return out.kv, emit(out.hidden[:, 0], column + 1)

    _, rest = jax.lax.scan(step, cache, jnp.arange(width - 1))
    found = jnp.concatenate([emit(hidden, 0)[None], rest]).T * mask[:, prompt_width:]
    return jnp.pad(found, ((0, 0), (prompt_width, 0)))
