"""One step's metrics row: plain numbers by documented key (docs/RUNS.md), nothing on the device."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.loop.collect import Collected
from fp4rl_jax.models.guidance import bytes_per_token
from fp4rl_jax.objectives.means import Sums, add_sums, merge
from fp4rl_jax.objectives.mismatch import mismatch_metrics
from fp4rl_jax.objectives.triage import asymmetry_metrics, delta_of
from fp4rl_jax.ops.inputs import Recovered
from fp4rl_jax.trainer import Outcome

Row = dict[str, float]


def rollout_row(collected: Collected) -> Row:
    """What the rollouts say: rewards, their parts, lengths, tokens and quantization statistics."""
    lengths = np.asarray(collected.rollouts.loss_mask).sum(axis=-1)
    group = collected.rollouts.group_size
    spread = collected.rewards.reshape(-1, group).std(axis=-1)
    row = {
        "reward_mean": float(collected.rewards.mean()),
        "reward_std": float(collected.rewards.std()),
        "correct_share": float(collected.correct.mean()),
        "mixed_groups_share": float((spread > 0).mean()),
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "finished_share": float(np.asarray(collected.rollouts.finished).mean()),
        "sampling_rounds": float(collected.rounds),
        "sampled_tokens": float(collected.sampled_tokens),
    }
    row |= {f"reward/{name}": float(values.mean()) for name, values in collected.parts.items()}
    if collected.rollouts.guidance:
        row["guidance_bytes_per_token"] = bytes_per_token(collected.rollouts.guidance)
    return row | quant_row("rollout", collected.rollouts.stats)


def update_row(outcomes: Sequence[Outcome]) -> Row:
    """What the updates say: loss, gradient, learning rate, entropy, the algorithm's metrics, skips."""
    row = flatten_sums(merge(*({"entropy": outcome.entropy, **outcome.metrics} for outcome in outcomes)))
    row["loss"] = float(np.mean([outcome.loss for outcome in outcomes]))
    row["grad_norm"] = float(np.mean([outcome.grad_norm for outcome in outcomes]))
    row["learning_rate"] = float(outcomes[-1].lr)
    row["updates_skipped"] = float(sum(not bool(outcome.applied) for outcome in outcomes))
    return row | quant_row("trainer", add_sums(*(outcome.stats for outcome in outcomes)))


def quant_row(side: str, stats: Mapping[str, Any]) -> Row:
    """A side's quantization shares: `quant/SIDE/SITE/...`, those of weights `quant/SIDE_weights/SITE/...`.

    Args:
        side: "rollout" or "trainer".
        stats: {site: {"act" | "weight" | "guided": {name: Sums}}}, over layers; sites without any are
            left out.
    """
    names = {"act": side, "weight": f"{side}_weights", "guided": side}
    row: Row = {}
    for site, operands in stats.items():
        for operand, found in operands.items():
            row |= flatten_sums(found, f"quant/{names[operand]}/{site}/")
    return row


def mismatch_row(
    batch: TrainBatch, old_logprobs: np.ndarray, *, clipped: Callable[[Array, Array], Array]
) -> Row:
    """The gap between the sides over the whole batch, raw, before any correction.

    Keys as in `mismatch`, and those of `triage.asymmetry_metrics`.
    """
    rollout, mask = jnp.asarray(batch.rollout_logprobs), jnp.asarray(batch.loss_mask)
    advantages = jnp.asarray(batch.advantages)
    found = _mismatch(jnp.asarray(old_logprobs), rollout, advantages, mask, clipped=clipped)
    return {name: float(value) for name, value in jax.device_get(found).items()}


@partial(jax.jit, static_argnames="clipped")
def _mismatch(
    old: Array, rollout: Array, advantages: Array, mask: Array, *, clipped: Any
) -> dict[str, Array]:
    log_ratio = delta_of(old, rollout, mask)
    found = mismatch_metrics(old, rollout, mask, clipped=clipped(log_ratio, mask))
    return found | asymmetry_metrics(log_ratio, advantages, mask)


def residual_row(recovered: Mapping[str, Recovered]) -> Row:
    """What the rollout's residual gives back, a site and a layer: error energy and underflow.

    Args:
        recovered: site -> sums with [L] leaves.
    """
    row: Row = {}
    for site, found in jax.device_get(dict(recovered)).items():
        total = jax.tree.map(lambda leaf: np.sum(leaf, dtype=np.float64), found)
        row |= _recovered_shares(total, f"residual/{site}")
        for number in range(found.signal.shape[0]):
            layer = jax.tree.map(lambda leaf, n=number: leaf[n], found)
            row |= _recovered_shares(layer, f"residual/{site}/layer_{number:02d}")
    return row


def _recovered_shares(found: Recovered, prefix: str) -> Row:
    signal, nonzero = max(float(found.signal), 1e-30), max(float(found.nonzero), 1.0)
    return {
        f"{prefix}/energy_before": float(found.error_before) / signal,
        f"{prefix}/energy_after": float(found.error_after) / signal,
        f"{prefix}/underflow_before": float(found.zero_before) / nonzero,
        f"{prefix}/underflow_after": float(found.zero_after) / nonzero,
    }


def flatten_sums(tree: Mapping[str, Any], prefix: str = "") -> Row:
    """Divides every Sums of a nested dict by its count, once; keys are joined by "/"."""
    row: Row = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            row |= flatten_sums(value, f"{prefix}{name}/")
        elif isinstance(value, Sums):
            row[f"{prefix}{name}"] = float(value.mean())
        else:
            row[f"{prefix}{name}"] = float(np.asarray(value))
    return row
