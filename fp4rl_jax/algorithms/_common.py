"""What the algorithm files share: the result type, the checks, the KL term, the batch."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import divergences
from fp4rl_jax.objectives.means import (
    Sums,
    masked_plain_sum,
    masked_sequence_sum,
    masked_sum,
    weighted_sum,
)


@struct.dataclass
class Loss:
    """What a loss returns: the numerator and denominator of a mean, and more such pairs.

    The loss of a batch is `sum / count` (1 where the count is 0) after both were added over its
    microbatches and devices; its gradient is the gradient of `sum` over the same denominator. The
    count depends on the batch alone, never on the log-probs.

    Attributes:
        sum: [] float32, differentiable.
        count: [] int32, tokens or sequences, as the algorithm averages; float32 where it is a sum of
            weights (`reduced`).
        metrics: sums by key; `loss` repeats sum and count with the sum's rounding error kept.
            `policy_ratio` mean ratio to `old_logprobs`; `policy_clipped_share` share of tokens
            whose ratio the algorithm limited; `ref_kl` k3 to the reference, nats/token.
    """

    sum: Array
    count: Array
    metrics: dict[str, Sums]


def require_group(algorithm: str, group_size: int) -> None:
    """Refuses groups of one where the baseline is the group.

    Raises:
        ValueError: group_size is below 2.
    """
    if group_size < 2:
        raise ValueError(
            f"{algorithm} compares completions of one prompt and needs group_size >= 2, got {group_size}"
        )


def require_positive(**fields: float) -> None:
    """Raises a ValueError naming the first field that is not a finite number above 0."""
    for name, value in fields.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}, expected a finite number above 0")


def require_not_negative(**fields: float) -> None:
    """Raises a ValueError naming the first field that is not a finite number of at least 0."""
    for name, value in fields.items():
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}, expected a finite number of at least 0")


def checked_rewards(rewards: Array, rollouts: Rollouts) -> Array:
    """[B] float32 rewards, refused if one of them is None, NaN or infinite.

    Values can only be looked at outside jit; under a trace only the shape is checked.

    Raises:
        ValueError: names the row, its prompt's index and the value.
    """
    if not isinstance(rewards, Tracer):
        values = np.asarray(rewards, dtype=np.float32)  # None becomes NaN here
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            row = int(bad[0])
            raise ValueError(
                f"reward of row {row} (prompt {row // rollouts.group_size}, completion "
                f"{row % rollouts.group_size}) is {values[row]}, expected a finite number; "
                f"{bad.size} of {values.size} rewards are not finite"
            )
        rewards = jnp.asarray(values)
    chex.assert_shape(rewards, rollouts.tokens.shape[:1])
    return rewards.astype(jnp.float32)


def completion_width(batch: Rollouts | TrainBatch) -> int:
    """Columns of the completion part: the configured maximum completion length."""
    return batch.tokens.shape[1] - batch.prompt_width


def train_batch(rollouts: Rollouts, advantages: Array, ref_logprobs: Array | None) -> TrainBatch:
    """The batch of a first update: rollouts with their advantages [B], no old log-probs yet."""
    dims = chex.Dimensions(B=rollouts.tokens.shape[0], T=rollouts.tokens.shape[1])
    chex.assert_shape([rollouts.loss_mask, rollouts.rollout_logprobs], dims["BT"])
    chex.assert_shape(advantages, dims["B"])
    if ref_logprobs is not None:
        chex.assert_shape(ref_logprobs, dims["BT"])
    return TrainBatch(
        tokens=rollouts.tokens,
        token_mask=rollouts.token_mask,
        loss_mask=rollouts.loss_mask,
        rollout_logprobs=rollouts.rollout_logprobs,
        advantages=advantages,
        ref_logprobs=ref_logprobs,
        guidance=rollouts.guidance,
        prompt_width=rollouts.prompt_width,
        group_size=rollouts.group_size,
    )


def check_loss_inputs(trainer_logprobs: Array, batch: TrainBatch, weights: Array) -> None:
    """Asserts the shapes that every loss takes: [B, T] log-probs, mask and weights, [B] advantages."""
    dims = chex.Dimensions(B=batch.tokens.shape[0], T=batch.tokens.shape[1])
    chex.assert_shape([trainer_logprobs, batch.loss_mask, weights], dims["BT"])
    chex.assert_shape(batch.advantages, dims["B"])
    chex.assert_type([trainer_logprobs, weights], jnp.float32)


def with_ref_kl(token_loss: Array, trainer_logprobs: Array, batch: TrainBatch, *, kl_coef: float) -> Array:
    """Adds kl_coef times k3(ref - trainer), an estimate of KL(trainer || ref), to each token's loss.

    Args:
        token_loss: [B, T] float32.
        trainer_logprobs: [B, T] float32, nats, differentiated.
        batch: `ref_logprobs` must be there unless kl_coef is 0.
        kl_coef: loss per nat; 0 leaves `token_loss` as it is.

    Raises:
        ValueError: kl_coef is not 0 and the batch has no ref_logprobs.
    """
    if kl_coef == 0:
        return token_loss
    return token_loss + kl_coef * _ref_kl(trainer_logprobs, batch, kl_coef=kl_coef)


def _ref_kl(trainer_logprobs: Array, batch: TrainBatch, *, kl_coef: float) -> Array:
    if batch.ref_logprobs is None:
        raise ValueError(f"kl_coef is {kl_coef} but the batch has no ref_logprobs")
    gap = jnp.where(batch.loss_mask, jax.lax.stop_gradient(batch.ref_logprobs) - trainer_logprobs, 0.0)
    return divergences.k3(divergences.clamped(gap))


def reduced(
    token_loss: Array, batch: TrainBatch, *, mean: Literal["tokens", "sequences"], length: int | None = None
) -> Sums:
    """The tokens' losses as sum and denominator: the algorithm's own mean, or the batch's weighted one.

    Args:
        token_loss: [B, T] float32, correction weights and KL term included.
        batch: its `weighting` replaces or, with reduction "algorithm", weighs the algorithm's mean.
        mean: over all tokens, or over the sequences' means.
        length: divides every sequence instead of its own token count.
    """
    weighting = batch.weighting
    if weighting is not None and weighting.reduction != "algorithm":
        return weighted_sum(token_loss, batch.loss_mask, weighting)
    if weighting is not None:
        token_loss = token_loss * jax.lax.stop_gradient(weighting.weights)
    if mean == "tokens":
        return masked_sum(token_loss, batch.loss_mask)
    return masked_sequence_sum(token_loss, batch.loss_mask, length=length)


def make_loss(
    sums: Sums, trainer_logprobs: Array, batch: TrainBatch, *, ratio: Array, clipped: Array
) -> Loss:
    """Wraps a loss's sums with the metrics that every algorithm reports."""
    metrics = {
        "loss": sums,
        "policy_ratio": masked_plain_sum(ratio, batch.loss_mask),
        "policy_clipped_share": masked_plain_sum(clipped, batch.loss_mask),
    }
    if batch.ref_logprobs is not None:
        metrics["ref_kl"] = masked_plain_sum(_ref_kl(trainer_logprobs, batch, kl_coef=0.0), batch.loss_mask)
    return Loss(sum=sums.total, count=sums.count, metrics=jax.lax.stop_gradient(metrics))


def all_groups(rewards: Array) -> Array:
    """[P] bool, all True: no group is dropped."""
    chex.assert_rank(rewards, 2)
    return jnp.ones(rewards.shape[0], bool)
