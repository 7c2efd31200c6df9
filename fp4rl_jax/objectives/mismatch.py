"""How far the rollout's log-probs are from the trainer's, at the rollout's own version.

The metrics and their names, so that a dashboard can be compared with other systems'
(verl, slime/miles, NeMo-RL and TRL log the same quantities under their own names). With
`l = trainer_logprobs - rollout_logprobs` on the masked tokens:

| key | value | unit |
| --- | --- | --- |
| `mismatch_kl` | mean of exp(l) - l - 1 (k3), unclamped: estimates KL(rollout, trainer) | nats/token |
| `mismatch_k1` | mean of -l | nats/token |
| `mismatch_k2` | mean of l^2 / 2 | nats/token |
| `mismatch_kl_reverse` | mean of exp(-l) + l - 1 | nats/token |
| `mismatch_js` | mean Jensen-Shannon estimate | nats/token |
| `multiplicative_error` | mean of exp(abs(l)); above 1.05 is alarming | factor |
| `logprob_gap_mean`, `logprob_gap_max` | mean and maximum of abs(l) | nats |
| `prob_gap_mean`, `prob_gap_max`, `prob_gap_std` | of abs(p - q), probabilities | probability |
| `prob_correlation` | Pearson correlation of p and q | -1..1 |
| `ratio_mean`, `ratio_min`, `ratio_max` | of exp(l), l clamped to +-20 | factor |
| `ratio_clipped_share` | share of tokens whose ratio the correction did not let through | 0..1 |
| `ratio_above_share`, `ratio_below_share` | share with ratio > cap, < 1 / cap | 0..1 |
| `effective_sample_size` | 1 / mean((w / mean w)^2), w = exp(l) clamped: share of the tokens | 0..1 |
| `chi2_token`, `chi2_sequence` | mean exp(2 l) - 1; mean over sequences of exp(2 sum l) - 1, clamped | - |
| `ppl_gap_mean`, `_abs_mean`, `_min`, `_max` | of mean q - mean p by sequence (> 0: less sure) | nats |
| `ppl_ratio` | mean over sequences of exp(ppl gap) | factor |
| `small_gap_share`, `tail_share` | share with abs(l) < 0.05; share with l < -6 | 0..1 |
| `moved_share` | share with abs(l) > 0.01 | 0..1 |

All are raw: nothing is clipped or dropped by a correction before it is measured. The gaps and
maxima see every token of the array, so call this on the whole batch, not on a microbatch. A
batch without a single token reports two equal sides: gaps and shares 0, ratios and effective
sample size 1.
"""

import chex
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.objectives import divergences
from fp4rl_jax.objectives.means import row_means

#: The ratio beyond which a token counts in `ratio_above_share` (and, inverted, `_below_share`).
RATIO_CAP = 2.0
#: The gap in nats beyond which a token counts in `moved_share`.
MOVED = 0.01


def mismatch_metrics(
    trainer_logprobs: Array,
    rollout_logprobs: Array,
    loss_mask: Array,
    *,
    clipped: Array | None = None,
    ratio_cap: float = RATIO_CAP,
) -> dict[str, Array]:
    """Measures the gap between two sides that scored the same tokens.

    Args:
        trainer_logprobs: [B, T] float32, nats, of the trainer before its update.
        rollout_logprobs: [B, T] float32, nats, as the sampler returned them.
        loss_mask: [B, T] bool.
        clipped: [B, T] bool, the correction's `clipped(...)`; without it, ratio > `ratio_cap`.
        ratio_cap: where `ratio_above_share` and `ratio_below_share` count from, > 1.

    Returns:
        [] float32 by key, all keys of the module's table, always.
    """
    chex.assert_rank([trainer_logprobs, rollout_logprobs, loss_mask], 2)
    chex.assert_equal_shape([trainer_logprobs, rollout_logprobs, loss_mask])
    chex.assert_type(loss_mask, bool)
    p = jnp.where(loss_mask, trainer_logprobs, 0.0).astype(jnp.float32)
    q = jnp.where(loss_mask, rollout_logprobs, 0.0).astype(jnp.float32)
    clipped = p - q > jnp.log(ratio_cap) if clipped is None else clipped
    return (
        _divergences(p, q, loss_mask)
        | _gaps(p, q, loss_mask)
        | _ratios(p - q, loss_mask, ratio_cap=ratio_cap)
        | _sequences(p, q, loss_mask)
        | {"ratio_clipped_share": _mean(clipped, loss_mask)}
    )


def _mean(values: Array, mask: Array, *, empty: float = 0.0) -> Array:
    """Mean over the mask; `empty` where the mask has no token."""
    count = jnp.sum(mask, dtype=jnp.int32)
    total = jnp.sum(jnp.where(mask, values, 0.0).astype(jnp.float32))
    return jnp.where(count > 0, total / jnp.maximum(count, 1), empty)


def _divergences(p: Array, q: Array, mask: Array) -> dict[str, Array]:
    gap = p - q
    return {
        "mismatch_kl": _mean(divergences.k3(gap), mask),
        "mismatch_k1": _mean(divergences.k1(gap), mask),
        "mismatch_k2": _mean(divergences.k2(gap), mask),
        "mismatch_kl_reverse": _mean(divergences.k3_reverse(gap), mask),
        "mismatch_js": _mean(divergences.jensen_shannon(p, q), mask),
    }


def _gaps(p: Array, q: Array, mask: Array) -> dict[str, Array]:
    gap = jnp.abs(p - q)
    prob_p, prob_q = jnp.exp(p), jnp.exp(q)
    prob_gap = jnp.abs(prob_p - prob_q)
    prob_gap_mean = _mean(prob_gap, mask)
    return {
        "multiplicative_error": _mean(jnp.exp(gap), mask, empty=1.0),
        "logprob_gap_mean": _mean(gap, mask),
        "logprob_gap_max": jnp.max(gap, initial=0.0),
        "prob_gap_mean": prob_gap_mean,
        "prob_gap_max": jnp.max(prob_gap, initial=0.0),
        "prob_gap_std": jnp.sqrt(_mean(jnp.square(prob_gap - prob_gap_mean), mask)),
        "prob_correlation": _correlation(prob_p, prob_q, mask),
        "small_gap_share": _mean(gap < 0.05, mask),
        "moved_share": _mean(gap > MOVED, mask),
        "tail_share": _mean(p - q < -6.0, mask),
    }


def _correlation(x: Array, y: Array, mask: Array) -> Array:
    """Pearson's; without spread on a side, 1 if the sides are equal on every token, else 0."""
    dx, dy = x - _mean(x, mask), y - _mean(y, mask)
    spread = jnp.sqrt(_mean(dx * dx, mask)) * jnp.sqrt(_mean(dy * dy, mask))
    equal = jnp.all(jnp.where(mask, x == y, True))
    safe = jnp.where(spread > 0, spread, 1.0)
    return jnp.where(spread > 0, _mean(dx * dy, mask) / safe, jnp.where(equal, 1.0, 0.0))


def _ratios(log_ratio: Array, mask: Array, *, ratio_cap: float) -> dict[str, Array]:
    ratio = jnp.exp(divergences.clamped(log_ratio))
    nothing = ~jnp.any(mask)
    mean = _mean(ratio, mask, empty=1.0)
    lowest = jnp.min(jnp.where(mask, ratio, jnp.inf), initial=jnp.inf)
    highest = jnp.max(jnp.where(mask, ratio, -jnp.inf), initial=-jnp.inf)
    return {
        "ratio_mean": mean,
        "ratio_min": jnp.where(nothing, 1.0, lowest),
        "ratio_max": jnp.where(nothing, 1.0, highest),
        "ratio_above_share": _mean(ratio > ratio_cap, mask),
        "ratio_below_share": _mean(ratio < 1.0 / ratio_cap, mask),
        "effective_sample_size": 1.0 / _mean(jnp.square(ratio / mean), mask, empty=1.0),
        "chi2_token": _mean(jnp.square(ratio), mask, empty=1.0) - 1.0,
    }


def _sequences(p: Array, q: Array, mask: Array) -> dict[str, Array]:
    rows = jnp.any(mask, axis=1)
    gap = row_means(q, mask) - row_means(p, mask)  # [B]
    whole = jnp.sum(p - q, axis=1)  # [B]; p and q are 0 off the mask
    nothing = ~jnp.any(rows)
    return {
        "ppl_gap_mean": _mean(gap, rows),
        "ppl_gap_abs_mean": _mean(jnp.abs(gap), rows),
        "ppl_gap_min": jnp.where(nothing, 0.0, jnp.min(jnp.where(rows, gap, jnp.inf), initial=jnp.inf)),
        "ppl_gap_max": jnp.where(nothing, 0.0, jnp.max(jnp.where(rows, gap, -jnp.inf), initial=-jnp.inf)),
        "ppl_ratio": _mean(jnp.exp(divergences.clamped(gap)), rows, empty=1.0),
        "chi2_sequence": _mean(jnp.exp(divergences.clamped(2.0 * whole)), rows, empty=1.0) - 1.0,
    }
