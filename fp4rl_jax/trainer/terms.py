"""What is done to an algorithm's loss from outside it: the Gate's weights, and terms that are added.

An update's loss is `sum / count` over its microbatches, divided once at the end. A term with a
denominator of its own joins it as `count * term`: the update's whole count must then be known before
the first microbatch is differentiated. It is, because it depends on the batch alone; only the Gate's
reduction "update" makes it depend on log-probs of all microbatches (`TriageConfig.counts_weights`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.models.routing import Watched
from fp4rl_jax.objectives import triage
from fp4rl_jax.objectives.centering import centering_term
from fp4rl_jax.objectives.means import Sums, Weighting, masked_plain_sum
from fp4rl_jax.objectives.mixture import changed_share, load_balance_loss, mixture_metrics
from fp4rl_jax.objectives.triage import TriageConfig


@struct.dataclass
class Denominators:
    """Of a whole update, known before its microbatches run.

    Attributes:
        loss: [] float32, the algorithm's count; None takes that of the microbatch, which is the batch.
        segments: [] float32, Repair's valid segments.
        microbatches: static, their number.
    """

    loss: Array | None
    segments: Array
    microbatches: int = struct.field(pytree_node=False, default=1)


def gated(share: TrainBatch, logprobs: Array, config: TriageConfig) -> TrainBatch:
    """The batch with the Gate's weights from the trainer's log-probs [B, T]; as it is with the Gate off."""
    if config.gate.scope == "off" or share.weighting is not None:
        return share
    delta = triage.delta_of(logprobs, share.rollout_logprobs, share.loss_mask)
    weights = triage.gate_weights(
        delta, share.advantages, share.loss_mask, config.gate, start=share.prompt_width
    )
    return dataclasses.replace(share, weighting=Weighting(weights=weights, reduction=config.gate.reduction))


def centered(share: TrainBatch, logprobs: Array | None) -> TrainBatch:
    """The batch with Score Centering's term, from the candidates' log-probs [B, T, k] if there are any."""
    if logprobs is None or share.candidate_logprobs is None:
        return share
    term = centering_term(logprobs, share.candidate_logprobs, share.advantages, share.loss_mask)
    return dataclasses.replace(share, token_term=term)


def added(
    share: TrainBatch, logprobs: Array, config: TriageConfig, denominators: Denominators
) -> tuple[Array, dict[str, Sums]]:
    """The microbatch's part of the terms that join the update's loss, and all of TRIAGE's metrics.

    Args:
        share: gated.
        logprobs: [B, T] float32, nats, of the trainer, differentiated.
        config, denominators: of the update.

    Returns:
        [] float32, parts that add up to the update's terms; metrics by key.
    """
    metrics: dict[str, Sums] = {}
    if share.weighting is not None:
        weights = share.weighting.weights
        metrics["triage/gate_weight"] = masked_plain_sum(weights, share.loss_mask)
        metrics["triage/gated_share"] = masked_plain_sum(weights < 1, share.loss_mask)
    if config.repair.scope == "off":
        return jnp.zeros([], jnp.float32), metrics
    delta = triage.delta_of(logprobs, share.rollout_logprobs, share.loss_mask)
    found = triage.repair(delta, share.advantages, share.loss_mask, config.repair, start=share.prompt_width)
    metrics |= {f"triage/{name}": jax.lax.stop_gradient(sums) for name, sums in found.items()}
    return config.repair.coef * found["repair"].total / denominators.segments, metrics


def num_segments(shares: TrainBatch, config: TriageConfig) -> Array:
    """[] float32, at least 1: Repair's denominator over stacked microbatches [M, B, T]."""
    mask = shares.loss_mask.reshape(-1, shares.loss_mask.shape[-1])
    count = triage.num_segments(mask, config.repair, start=shares.prompt_width)
    return jnp.maximum(count, 1).astype(jnp.float32)


def mixture(watched: Watched, num_active: int) -> tuple[Array, dict[str, Sums]]:
    """A microbatch's load-balance loss [] float32, differentiable, and the metrics of its routing."""
    seen = (watched.assigned, watched.prob_sum, watched.tokens, watched.computed, watched.entropy_sum)
    assigned, prob_sum, tokens, computed, entropy_sum = (jnp.asarray(x) for x in seen)
    balance = load_balance_loss(assigned, prob_sum, tokens)
    metrics = mixture_metrics(assigned, computed, tokens, entropy_sum, num_active=num_active)
    still = jax.lax.stop_gradient(balance)
    metrics["moe/balance_loss"] = Sums(total=still, count=jnp.int32(1), carry=jnp.zeros_like(still))
    changed, recorded = jnp.asarray(watched.changed), jnp.asarray(watched.recorded)
    metrics["moe/changed_share"] = changed_share(changed, recorded)
    return balance, metrics
