"""Score Centering (arXiv 2609.20807): an additive term that takes the drift out of an off-policy gradient.

A token a is drawn from the sampler's distribution q, and its gradient is that of log p(a) under the
trainer's p. The expectation of that gradient, sum of q(v) grad log p(v), is zero only where q = p: what is
left is a drift that has nothing to do with the reward. Over the k candidates v that the sampler recorded,
its likeliest ones,

    C = sum over v of sg(q(v) - rho p(v)) log p(v),   rho = (1 - sum q(v)) / (1 - sum p(v))
    L += A C

cancels it: exactly on the candidates, and on the rest as far as q is rho times p there. This is the form
without importance weights.
"""

import chex
import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array

#: A mass beside the candidates below this is the rounding of a float32 sum, not a distribution: rho is 1.
SMALLEST_REST = 2.0**-18


def centering_term(logprobs: Array, rollout_logprobs: Array, advantages: Array, loss_mask: Array) -> Array:
    """A C of every token, to be added to its loss.

    Args:
        logprobs: [B, T, k] float32 nats, log p of each token's candidates, differentiated.
        rollout_logprobs: [B, T, k] float32 nats, log q of them, as the sampler recorded it.
        advantages: [B] float32.
        loss_mask: [B, T] bool; what is off it may be anything.

    Returns:
        [B, T] float32, 0 off the mask.
    """
    chex.assert_equal_shape([logprobs, rollout_logprobs])
    chex.assert_shape(loss_mask, logprobs.shape[:2])
    chex.assert_shape(advantages, logprobs.shape[:1])
    inside = loss_mask[..., None]
    log_p, log_q = (
        jnp.where(inside, x, -jnp.inf) for x in (jax.lax.stop_gradient(logprobs), rollout_logprobs)
    )
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    rest_p, rest_q = (jnp.maximum(1.0 - jnp.sum(x, axis=-1, keepdims=True), 0.0) for x in (p, q))
    known = rest_p > SMALLEST_REST
    rho = jnp.where(known, rest_q / jnp.where(known, rest_p, 1.0), 1.0)
    kept = jnp.where(inside, logprobs, 0.0)
    return advantages[:, None] * jnp.sum(jnp.where(inside, q - rho * p, 0.0) * kept, axis=-1)
