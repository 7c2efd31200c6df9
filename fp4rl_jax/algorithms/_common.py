"""What the algorithm files share: settings, the result type, the checks, the KL term, the batch.

An algorithm's file is its formulas: advantages from rewards, a token's loss, and what the loss is a
mean over. `prepare_with` and `loss_with` put them between the checks that every algorithm makes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import advantages, divergences, policy
from fp4rl_jax.objectives.means import (
    Sums,
    masked_plain_sum,
    masked_sequence_sum,
    masked_sum,
    weighted_sum,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """The setting of every algorithm.

    Attributes:
        kl_coef: weight of the KL term to a frozen reference, loss per nat; 0 needs no reference.
    """

    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(kl_coef=self.kl_coef)

    @property
    def needs_reference(self) -> bool:
        """Whether `prepare` must be given ref_logprobs."""
        return self.kl_coef > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedConfig(BaseConfig):
    """Settings of an algorithm that limits the ratio to the old policy.

    Attributes:
        clip_low, clip_high: how far the ratio may fall below and rise above 1.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(clip_low=self.clip_low, clip_high=self.clip_high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedConfig(ClippedConfig):
    """Settings of an algorithm that divides advantages by a standard deviation as well.

    Attributes:
        std_eps: added to the (population) standard deviation, in units of the reward.
    """

    std_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(std_eps=self.std_eps)


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
        candidates=rollouts.candidates,
        candidate_logprobs=rollouts.candidate_logprobs,
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
        batch: its `token_term` is added; its `weighting` replaces or, with reduction "algorithm", weighs
            the algorithm's mean.
        mean: over all tokens, or over the sequences' means.
        length: divides every sequence instead of its own token count.
    """
    if batch.token_term is not None:
        token_loss = token_loss + batch.token_term
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


class TokenLoss(NamedTuple):
    """An algorithm's loss by token, before correction weights and KL term; [B, T] each.

    Attributes:
        loss: float32, differentiable.
        ratio: float32, to the old policy.
        clipped: bool, where the algorithm limited the ratio.
    """

    loss: Array
    ratio: Array
    clipped: Array


class Validate(Protocol):
    """An algorithm's `validate`: ValueError where a group size cannot work."""

    def __call__(self, config: Any, *, group_size: int) -> None: ...


class Prepare(Protocol):
    """An algorithm's `prepare`: rollouts and rewards [B] to a batch with advantages [B]."""

    def __call__(
        self, rollouts: Rollouts, rewards: Array, config: Any, *, ref_logprobs: Array | None = None
    ) -> TrainBatch: ...


class LossFn(Protocol):
    """An algorithm's `loss` from [B, T] float32 log-probs and detached correction weights."""

    def __call__(self, trainer_logprobs: Array, batch: TrainBatch, weights: Array, config: Any) -> Loss: ...


def validate_group(config: Any, *, group_size: int) -> None:
    """`validate` where the baseline is the group: a group of one has none.

    Raises:
        ValueError: group_size is below 2; names the algorithm.
    """
    require_group(type(config).__module__.rpartition(".")[2], group_size)


def prepare_with(advantage: Callable[[Array, Rollouts, Any], Array], *, validate: Validate) -> Prepare:
    """`prepare` of an algorithm without a term in the reward that needs the reference.

    Args:
        advantage: (rewards [B] float32, rollouts, config) -> advantages [B] float32.
        validate: the algorithm's.
    """

    def prepare(
        rollouts: Rollouts, rewards: Array, config: Any, *, ref_logprobs: Array | None = None
    ) -> TrainBatch:
        """Rollouts and rewards [B] to a batch with advantages [B]; see `_common.checked_rewards`."""
        validate(config, group_size=rollouts.group_size)
        rewards = checked_rewards(rewards, rollouts)
        return train_batch(rollouts, advantage(rewards, rollouts, config), ref_logprobs)

    return prepare


def group_normalized(rewards: Array, rollouts: Rollouts, config: Any) -> Array:
    """A = (r - mean) / (std + eps) over the group, [B]."""
    return advantages.group_normalized(rewards, group_size=rollouts.group_size, eps=config.std_eps)


def loss_with(
    by_token: Callable[[Array, TrainBatch, Any], TokenLoss], *, mean: Callable[[Array, TrainBatch, Any], Sums]
) -> LossFn:
    """`loss` of an algorithm: its token losses times the correction's weights, plus the KL term.

    Args:
        by_token: (trainer_logprobs, batch, config) -> TokenLoss.
        mean: (token losses [B, T], batch, config) -> Sums, what the loss is a mean over.
    """

    def loss(trainer_logprobs: Array, batch: TrainBatch, weights: Array, config: Any) -> Loss:
        """Policy loss from [B, T] float32 log-probs; `weights` [B, T] are the correction's, detached."""
        check_loss_inputs(trainer_logprobs, batch, weights)
        found = by_token(trainer_logprobs, batch, config)
        token_loss = found.loss * jax.lax.stop_gradient(weights)
        token_loss = with_ref_kl(token_loss, trainer_logprobs, batch, kl_coef=config.kl_coef)
        sums = mean(token_loss, batch, config)
        return make_loss(sums, trainer_logprobs, batch, ratio=found.ratio, clipped=found.clipped)

    return loss


def token_ratio(trainer_logprobs: Array, batch: TrainBatch) -> Array:
    """rho [B, T] = exp(trainer - old log-probs); 1 off the mask."""
    return jnp.exp(policy.log_ratio(trainer_logprobs, batch.old_logprobs, batch.loss_mask))


def clipped_surrogate(ratio: Array, batch: TrainBatch, config: Any) -> TokenLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)."""
    token_loss, clipped = policy.clipped_surrogate(
        ratio, batch.advantages, clip_low=config.clip_low, clip_high=config.clip_high
    )
    return TokenLoss(token_loss, ratio, clipped)


def surrogate(trainer_logprobs: Array, batch: TrainBatch, config: Any) -> TokenLoss:
    """The clipped surrogate of every token's own ratio."""
    return clipped_surrogate(token_ratio(trainer_logprobs, batch), batch, config)


def token_mean(token_loss: Array, batch: TrainBatch, config: Any) -> Sums:
    """Mean over all tokens."""
    del config
    return reduced(token_loss, batch, mean="tokens")


def sequence_mean(token_loss: Array, batch: TrainBatch, config: Any) -> Sums:
    """Mean over the tokens of a sequence, then over sequences."""
    del config
    return reduced(token_loss, batch, mean="sequences")


def keep_all(rewards: Array, config: Any) -> Array:
    """`wanted` of an algorithm that drops no group: [P] bool, all True."""
    del config
    return all_groups(rewards)


def all_groups(rewards: Array) -> Array:
    """[P] bool, all True: no group is dropped."""
    chex.assert_rank(rewards, 2)
    return jnp.ones(rewards.shape[0], bool)
