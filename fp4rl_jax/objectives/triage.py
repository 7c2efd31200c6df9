"""TRIAGE (arXiv 2610.07043): act on the mismatch only where a policy step makes it worse.

With `delta = log pi_trainer - log pi_rollout` of a sampled token and its advantage A, one step moves
delta in the direction of A: where both have one sign the step *amplifies* the mismatch, elsewhere it
contracts it. Quadrants are counted as in the plane of (A, delta): q1 = (+, +), q2 = (-, +),
q3 = (-, -), q4 = (+, -), so that q1 and q3 amplify.

* **Gate** weighs the policy loss, detached. A response falls into segments of 64 tokens; a segment
  whose mean advantage is below 0 is eligible. With d its mean delta and k its tokens with
  delta < -6:

      w_mean = 0.1 if d < -1.5, 0.3 if -1.5 <= d < -0.5, else 1
      w_tail = 1 - 0.9 min(k / 2, 1)
      w_seg  = min(w_mean, w_tail)

  and a token weighs w_seg where delta < 0 in an eligible segment (scope "q3"), 1 elsewhere. The loss
  becomes a weighted mean; over what is the `reduction` (see `GateConfig`).
* **Repair** adds a bounded pull on segments of 128 tokens. With q = max(tau - d, 0):

      phi(q) = beta^2 (sqrt(1 + (q / beta)^2) - 1)
      L += 0.015 * sum over selected segments of phi / number of ALL valid segments

  Its slope in d never exceeds beta. Scope "adv_positive" selects segments of positive mean advantage.

A segment is a run of columns counted from `start`, the first column of the completions; the last one
may be short. Tokens off the loss mask take part in no mean and no count; a segment without a token on
the mask is not valid and counts nowhere.
"""

import dataclasses
import math
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array, check_name
from fp4rl_jax.objectives.means import Reduction, Sums

GateScope = Literal["off", "q3", "segment"]
RepairScope = Literal["off", "adv_positive", "all"]
Microbatches = Literal["keep_inputs", "score_twice"]


def _require_at_least_one(section: str, **fields: int) -> None:
    for name, value in fields.items():
        if value < 1:
            raise ValueError(f"triage.{section}.{name} is {value}, expected at least 1")


def _require_finite(section: str, **fields: float) -> None:
    for name, value in fields.items():
        if not math.isfinite(value):
            raise ValueError(f"triage.{section}.{name} is {value}, expected a finite number of nats")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The Gate; the numbers are the published ones.

    Attributes:
        scope: "off"; "q3", tokens with delta < 0 of eligible segments (as published); "segment", all
            tokens of eligible segments.
        reduction: what the weighted mean is over. "update": sum of w l over sum of w of the whole
            optimizer update, whatever the algorithm's own mean (the published code). "response":
            that quotient per response, then the mean of the responses (the paper's text).
            "algorithm": the numerator alone is weighted, the algorithm keeps its denominator.
        microbatches: how an update of several microbatches gets the sum of w that "update" needs before its
            first gradient where a term with another denominator (Repair, load balance) joins the loss.
            "keep_inputs": all forwards run first and leave their layers' inputs until the gradients, as much
            memory as one microbatch of all rows (with `trainer.remat = "none"`, all activations);
            "score_twice": the batch is scored once more beforehand, a quarter to a fifth of an update.
        segment: tokens of a segment.
        mild, strong: means of delta in nats below which a segment weighs `mild_weight` and
            `strong_weight`.
        tail: a token with delta below it counts towards k.
        tail_count: the k at which w_tail reaches `tail_weight`.
    """

    scope: GateScope = "off"
    reduction: Reduction = "update"
    microbatches: Microbatches = "keep_inputs"
    segment: int = 64
    mild: float = -0.5
    strong: float = -1.5
    mild_weight: float = 0.3
    strong_weight: float = 0.1
    tail: float = -6.0
    tail_count: int = 2
    tail_weight: float = 0.1

    def __post_init__(self) -> None:
        check_name("triage.gate.scope", self.scope, ("off", "q3", "segment"))
        check_name("triage.gate.reduction", self.reduction, ("update", "response", "algorithm"))
        check_name("triage.gate.microbatches", self.microbatches, ("keep_inputs", "score_twice"))
        _require_at_least_one("gate", segment=self.segment, tail_count=self.tail_count)
        _require_finite("gate", mild=self.mild, strong=self.strong, tail=self.tail)
        for name in ("mild_weight", "strong_weight", "tail_weight"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"triage.gate.{name} is {value}, expected 0 < {name} <= 1")
        if not self.strong <= self.mild:
            raise ValueError(f"triage.gate.strong is {self.strong}, expected at most mild = {self.mild}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Repair; the numbers are the published ones.

    Attributes:
        scope: "off"; "adv_positive", segments whose mean advantage is above 0 (as published); "all".
        coef: weight of the term, loss per nat^2.
        segment: tokens of a segment.
        threshold: tau in nats; segments whose mean delta is above it are left alone.
        beta_squared: beta^2 in nats^2; beta bounds the slope of phi.
    """

    scope: RepairScope = "off"
    coef: float = 0.015
    segment: int = 128
    threshold: float = -0.03
    beta_squared: float = 0.0005

    def __post_init__(self) -> None:
        check_name("triage.repair.scope", self.scope, ("off", "adv_positive", "all"))
        _require_at_least_one("repair", segment=self.segment)
        _require_finite("repair", threshold=self.threshold)
        for name in ("coef", "beta_squared"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"triage.repair.{name} is {value}, expected a finite number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriageConfig:
    """Both halves of TRIAGE, each off unless its scope says otherwise.

    Attributes:
        gate, repair: the halves.
    """

    gate: GateConfig = GateConfig()
    repair: RepairConfig = RepairConfig()

    @property
    def counts_weights(self) -> bool:
        """Whether an update's count is the sum of the Gate's weights, hence depends on log-probs."""
        return self.gate.scope != "off" and self.gate.reduction == "update"

    def validate(self, root: Any) -> None:
        """Refuses to keep layers' inputs, guidance among them, where guidance is not to stay on the device.

        Raises:
            ValueError: naming both keys.
        """
        joined = self.repair.scope != "off" or root.moe.balance_coef > 0
        kept = joined and self.counts_weights and self.gate.microbatches == "keep_inputs"
        if kept and root.trainer.guidance_memory == "host":
            raise ValueError(
                'triage.gate.microbatches = "keep_inputs" keeps guidance on the device until the gradients: '
                'expected "score_twice" beside trainer.guidance_memory = "host"'
            )


@struct.dataclass
class Segments:
    """Masked facts of the segments of a batch; [B, S] each.

    Attributes:
        tokens: int32, tokens on the mask; 0 where the segment is not valid.
        delta: float32, mean delta in nats; 0 where not valid.
        advantage: float32, mean advantage; 0 where not valid.
    """

    tokens: Array
    delta: Array
    advantage: Array


def delta_of(trainer_logprobs: Array, rollout_logprobs: Array, loss_mask: Array) -> Array:
    """[B, T] float32: trainer minus rollout log-prob in nats, 0 off the mask whatever stands there."""
    chex.assert_rank([trainer_logprobs, rollout_logprobs, loss_mask], 2)
    chex.assert_equal_shape([trainer_logprobs, rollout_logprobs, loss_mask])
    chex.assert_type(loss_mask, bool)
    kept = jnp.where(loss_mask, trainer_logprobs, 0.0) - jnp.where(loss_mask, rollout_logprobs, 0.0)
    return kept.astype(jnp.float32)


def segments(delta: Array, advantages: Array, loss_mask: Array, *, size: int, start: int = 0) -> Segments:
    """Means of delta and advantage by segment of `size` columns from column `start` on.

    Args:
        delta: [B, T] float32, nats, 0 off the mask (`delta_of`); differentiable.
        advantages: [B] or [B, T] float32.
        loss_mask: [B, T] bool.

    Returns:
        [B, S] facts, S = ceil((T - start) / size).
    """
    tokens = jnp.sum(cut(loss_mask, size=size, start=start), axis=-1, dtype=jnp.int32)
    count = jnp.maximum(tokens, 1)
    kept = jnp.where(loss_mask, _by_token(advantages, loss_mask), 0.0).astype(jnp.float32)
    delta, kept = (jnp.sum(cut(x, size=size, start=start), axis=-1) / count for x in (delta, kept))
    return Segments(tokens=tokens, delta=delta, advantage=kept)


def cut(x: Array, *, size: int, start: int) -> Array:
    """[B, T] to [B, S, size]: columns from `start` on, the last segment padded with zeros."""
    if not 0 <= start < x.shape[1]:
        raise ValueError(f"start is column {start}, expected one of the {x.shape[1]} columns")
    x = x[:, start:]
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(x.shape[0], -1, size)


def _by_token(advantages: Array, loss_mask: Array) -> Array:
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    chex.assert_shape(advantages, (loss_mask.shape[0], None))
    return jnp.broadcast_to(advantages, loss_mask.shape)


def gate_weights(
    delta: Array, advantages: Array, loss_mask: Array, config: GateConfig, *, start: int = 0
) -> Array:
    """The Gate's weights, detached.

    Args:
        delta: [B, T] float32, nats, from `delta_of`.
        advantages: [B] or [B, T] float32.
        loss_mask: [B, T] bool.
        config: the scope "off" gives ones.
        start: first column of the completions.

    Returns:
        [B, T] float32 in (0, 1]; 1 off the mask and before `start`.
    """
    chex.assert_equal_shape([delta, loss_mask])
    delta = jax.lax.stop_gradient(delta)
    ones = jnp.ones(delta.shape, jnp.float32)
    if config.scope == "off":
        return ones
    found = segments(delta, advantages, loss_mask, size=config.segment, start=start)
    tail = jnp.sum(
        cut((delta < config.tail) & loss_mask, size=config.segment, start=start), axis=-1, dtype=jnp.int32
    )
    weight = jnp.minimum(_mean_weight(found.delta, config), _tail_weight(tail, config))
    eligible = (found.tokens > 0) & (found.advantage < 0)
    weight = jnp.where(eligible, weight, 1.0)  # [B, S]
    spread = jnp.repeat(weight, config.segment, axis=1)[:, : delta.shape[1] - start]
    chosen = loss_mask & (delta < 0) if config.scope == "q3" else loss_mask
    return jnp.where(chosen, ones.at[:, start:].set(spread), 1.0)


def _mean_weight(mean: Array, config: GateConfig) -> Array:
    mild = jnp.where(mean < config.mild, config.mild_weight, 1.0)
    return jnp.where(mean < config.strong, config.strong_weight, mild)


def _tail_weight(count: Array, config: GateConfig) -> Array:
    share = jnp.minimum(count.astype(jnp.float32) / config.tail_count, 1.0)
    return jnp.where(share >= 1, config.tail_weight, 1.0 - (1.0 - config.tail_weight) * share)


def repair(
    delta: Array, advantages: Array, loss_mask: Array, config: RepairConfig, *, start: int = 0
) -> dict[str, Sums]:
    """The Repair term as sums over segments; its gradient reaches delta in the selected ones.

    Args:
        delta: [B, T] float32, nats, from `delta_of`, differentiable in the trainer's log-probs.
        advantages: [B] or [B, T] float32.
        loss_mask: [B, T] bool.
        config: the scope must not be "off".
        start: first column of the completions.

    Returns:
        `repair`: sum of phi over the selected segments, over the number of all valid ones (`coef` is
        not in it); `repair_share`: the selected segments with q > 0, over the same number.
    """
    found = segments(delta, advantages, loss_mask, size=config.segment, start=start)
    valid = found.tokens > 0
    selected = valid & (found.advantage > 0) if config.scope == "adv_positive" else valid
    missing = jnp.where(selected, jnp.maximum(config.threshold - found.delta, 0.0), 0.0)
    count = jnp.sum(valid, dtype=jnp.int32)
    zero = jnp.zeros([], jnp.float32)
    active = jnp.sum(missing > 0, dtype=jnp.float32)
    return {
        "repair": Sums(total=jnp.sum(pseudo_huber(missing, config.beta_squared)), count=count, carry=zero),
        "repair_share": Sums(total=active, count=count, carry=zero),
    }


def pseudo_huber(q: Array, beta_squared: float) -> Array:
    """beta^2 (sqrt(1 + (q / beta)^2) - 1), written as q^2 / (sqrt(1 + (q / beta)^2) + 1).

    Error: a few float32 roundings at every q >= 0; the textbook form loses all digits near 0.
    """
    return q * q / (jnp.sqrt(1.0 + q * q / beta_squared) + 1.0)


def num_segments(loss_mask: Array, config: RepairConfig, *, start: int = 0) -> Array:
    """[] int32, the valid segments of a batch [B, T]: Repair's denominator, known from the mask alone."""
    per_segment = jnp.any(cut(loss_mask, size=config.segment, start=start), axis=-1)
    return jnp.sum(per_segment, dtype=jnp.int32)


def asymmetry_metrics(delta: Array, advantages: Array, loss_mask: Array) -> dict[str, Any]:
    """How far the two amplifying quadrants are out of balance.

    Args:
        delta: [B, T] float32, nats, from `delta_of`.
        advantages: [B] or [B, T] float32.
        loss_mask: [B, T] bool.

    Returns:
        [] float32 by key: `quadrant_mass/q1` .. `q4`, the sum of abs(delta) over the quadrant's tokens
        divided by the number of ALL tokens on the mask, nats/token; `asymmetry_ratio`, the sum of
        abs(A) over q3's tokens divided by that over q1's (1 where both are 0); `tail_count`, tokens
        with delta < -6.
    """
    advantage = _by_token(advantages, loss_mask)
    count = jnp.maximum(jnp.sum(loss_mask, dtype=jnp.int32), 1)
    inside = {
        "q1": (advantage > 0) & (delta > 0),
        "q2": (advantage < 0) & (delta > 0),
        "q3": (advantage < 0) & (delta < 0),
        "q4": (advantage > 0) & (delta < 0),
    }
    inside = {name: where & loss_mask for name, where in inside.items()}
    found: dict[str, Any] = {
        f"quadrant_mass/{name}": jnp.sum(jnp.where(where, jnp.abs(delta), 0.0)) / count
        for name, where in inside.items()
    }
    low, high = (jnp.sum(jnp.where(inside[name], jnp.abs(advantage), 0.0)) for name in ("q3", "q1"))
    found["asymmetry_ratio"] = jnp.where(low == high, 1.0, low / high)
    tail = GateConfig().tail
    found["tail_count"] = jnp.sum(loss_mask & (delta < tail), dtype=jnp.int32).astype(jnp.float32)
    return found
