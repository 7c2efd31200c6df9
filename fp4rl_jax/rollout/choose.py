"""One token per row from a row of logits: exact sampling, or the likeliest token.

Sampling is Gumbel-argmax in float32, done in two levels so that a step draws a few hundred
random numbers per row instead of one per vocabulary entry: first a block of 128 tokens by its
total mass, then a token inside it. p(block) * p(token | block) = p(token), so the distribution
is that of the one-level form. Every draw depends on the row's own key and step only.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.rollout.config import SamplingConfig

_BLOCK = 128
_CUT = -jnp.inf  # the logit of a token that cannot be sampled


def row_keys(sample_key: Array, row_ids: Array | np.ndarray) -> Array:
    """One key a row, from the key of the whole rollout and the rows' global ids.

    Args:
        sample_key: [] typed PRNG key.
        row_ids: [B] int, the rows' ids over all hosts and batches of this rollout.

    Returns:
        [B] typed PRNG keys; equal (key, id) pairs give equal keys whatever the batch.
    """
    return jax.vmap(lambda i: jax.random.fold_in(sample_key, i))(jnp.asarray(row_ids))


def choose(scores: Array, keys: Array, sampling: SamplingConfig) -> Array:
    """Picks a token in every row.

    Args:
        scores: [B, V] float32, logits after the temperature: those that the log-prob is taken from.
        keys: [B] typed PRNG keys of this step.
        sampling: the truncation; greedy takes the first largest score.

    Returns:
        [B] int32 token ids.
    """
    if sampling.is_greedy:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return jax.vmap(_gumbel_two_level)(truncate(scores, sampling), keys)


def _gumbel_two_level(logits: Array, key: Array) -> Array:
    """A sample of softmax(logits) for one row, logits [V] float32 -> [] int32."""
    num_blocks = -(-logits.size // _BLOCK)
    blocks = jnp.pad(logits, (0, num_blocks * _BLOCK - logits.size), constant_values=_CUT)
    blocks = blocks.reshape(num_blocks, _BLOCK)
    block_key, token_key = jax.random.split(key)
    mass = jax.nn.logsumexp(blocks, axis=-1)
    block = jnp.argmax(mass + jax.random.gumbel(block_key, (num_blocks,), jnp.float32))
    inside = jax.random.gumbel(token_key, (_BLOCK,), jnp.float32)
    token = jnp.argmax(jax.lax.dynamic_index_in_dim(blocks, block, keepdims=False) + inside)
    return (block * _BLOCK + token).astype(jnp.int32)


def truncate(logits: Array, sampling: SamplingConfig) -> Array:
    """Sets the logits of tokens outside the kept set to -inf: top-k, then top-p, then min-p.

    Args:
        logits: [B, V] float32, after the temperature.
        sampling: the three limits; each that is off leaves the logits as they are.

    Returns:
        [B, V] float32; the likeliest token is always kept.
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < floor, _CUT, logits)
    if sampling.top_p < 1.0:
        ordered = -jnp.sort(-logits, axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # mass of the tokens ahead of each
        inside = (before < sampling.top_p).at[:, 0].set(True)
        floor = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < floor, _CUT, logits)
    if sampling.min_p > 0.0:
        largest = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits < largest + jnp.log(jnp.float32(sampling.min_p)), _CUT, logits)
    return logits
