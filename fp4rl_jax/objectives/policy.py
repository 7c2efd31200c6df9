"""Per-token policy losses: the ratio to the policy that sampled, and what is done with it."""

import chex
import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.objectives import divergences
from fp4rl_jax.objectives.means import row_means


def log_ratio(trainer_logprobs: Array, old_logprobs: Array | None, loss_mask: Array) -> Array:
    """trainer_logprobs - old_logprobs on the mask, 0 off it, clamped to +-20 nats.

    Args:
        trainer_logprobs: [B, T] float32, nats, differentiated.
        old_logprobs: [B, T] float32, nats, constant; None means "equal to trainer_logprobs":
            the first update of a rollout, where the result is exactly 0 with gradient 1.
        loss_mask: [B, T] bool; what is off it may be anything, NaN included.
    """
    chex.assert_rank([trainer_logprobs, loss_mask], 2)
    old = trainer_logprobs if old_logprobs is None else old_logprobs
    chex.assert_equal_shape([trainer_logprobs, old, loss_mask])
    difference = trainer_logprobs - jax.lax.stop_gradient(old)
    return divergences.clamped(jnp.where(loss_mask, difference, 0.0))


def sequence_log_ratio(token_log_ratio: Array, loss_mask: Array) -> Array:
    """GSPO's ratio in token form (arXiv 2507.18071, eq. 14): sg(s) * pi / sg(pi), as a logarithm.

    Args:
        token_log_ratio: [B, T] float32 from `log_ratio`.
        loss_mask: [B, T] bool.

    Returns:
        [B, T] float32: on every token of row b the value is the row's mean log-ratio; the
        gradient reaches the token's own log-prob. A mean over the row's tokens of anything
        linear in its exponential has the value and the gradient of the sequence form.
    """
    mean = jax.lax.stop_gradient(row_means(token_log_ratio, loss_mask))[:, None]  # [B, 1]
    own = token_log_ratio - jax.lax.stop_gradient(token_log_ratio)
    return jnp.where(loss_mask, mean + own, 0.0)


def clipped_surrogate(
    ratio: Array, advantages: Array, *, clip_low: float, clip_high: float
) -> tuple[Array, Array]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) (PPO, arXiv 1707.06347).

    Args:
        ratio: [B, T] float32.
        advantages: [B] float32, one a sequence.
        clip_low, clip_high: how far the ratio may fall below and rise above 1.

    Returns:
        ([B, T] float32 loss, [B, T] bool True where the clip holds the gradient back).
    """
    chex.assert_shape(advantages, ratio.shape[:1])
    advantage = advantages[:, None]
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    return -jnp.where(clipped, bounded, ratio) * advantage, clipped


def weighted_log_likelihood(
    trainer_logprobs: Array, ratio: Array, advantages: Array, *, clip_low: float, clip_high: float
) -> tuple[Array, Array]:
    """-sg(clip(ratio)) * A * log pi (CISPO, arXiv 2506.13585): every token keeps its gradient.

    Args:
        trainer_logprobs: [B, T] float32, nats, differentiated.
        ratio: [B, T] float32, used as a constant.
        advantages: [B] float32.
        clip_low, clip_high: bounds of the weight, 1 - clip_low and 1 + clip_high.

    Returns:
        ([B, T] float32 loss, [B, T] bool True where the weight was limited).
    """
    chex.assert_shape(advantages, ratio.shape[:1])
    low, high = 1.0 - clip_low, 1.0 + clip_high
    weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    return -weight * advantages[:, None] * trainer_logprobs, (ratio > high) | (ratio < low)
