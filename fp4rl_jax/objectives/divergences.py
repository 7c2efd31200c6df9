"""Per-token estimates of a divergence from one log-ratio (Schulman's k1, k2, k3).

With `log_ratio = log p - log q` at a token drawn from q, each is an estimate of KL(q || p) in
nats: k1 unbiased with high variance, k2 biased with low, k3 unbiased, low, and never negative.
All are elementwise over any shape, float32 in and out, differentiable, and finite up to a
log-ratio of 88 (where exp overflows float32).
"""

import jax.numpy as jnp

from fp4rl_jax.arrays import Array

#: Log-ratios are clamped to this many nats on either side before an exponential is weighted or
#: multiplied, so that one impossible token cannot make a sum infinite.
MAX_LOG_RATIO = 20.0


def clamped(log_ratio: Array) -> Array:
    """`log_ratio` limited to +-20 nats; beyond it the gradient is 0."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(log_ratio: Array) -> Array:
    """-log_ratio: unbiased, any sign."""
    return -log_ratio


def k2(log_ratio: Array) -> Array:
    """log_ratio^2 / 2."""
    return 0.5 * jnp.square(log_ratio)


def k3(log_ratio: Array) -> Array:
    """exp(log_ratio) - log_ratio - 1: unbiased and never negative.

    Error: relative 1e-5. Below 0.05 nats the textbook form loses all its digits in float32
    (1e-4 nats give 5e-9 +- 6e-8), so the power series is used there.
    """
    small = jnp.abs(log_ratio) < 0.05
    inner = jnp.where(small, log_ratio, 0.0)
    series = inner * inner * (1 / 2 + inner * (1 / 6 + inner * (1 / 24 + inner / 120)))
    outer = jnp.where(small, 0.0, log_ratio)
    return jnp.where(small, series, jnp.expm1(outer) - outer)


def k3_reverse(log_ratio: Array) -> Array:
    """exp(-log_ratio) + log_ratio - 1: k3 with the sides swapped; one bad token dominates it."""
    return k3(-log_ratio)


def jensen_shannon(log_p: Array, log_q: Array) -> Array:
    """Half of k3 from the mixture to either side: 0.5 k3(p - m) + 0.5 k3(q - m), m = log((p+q)/2).

    Args:
        log_p, log_q: log-probabilities of the same token on the two sides, nats, same shape.

    Returns:
        Estimates in nats, never negative, growing only linearly with the gap between the sides.
    """
    mixture = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * k3(log_p - mixture) + 0.5 * k3(log_q - mixture)
