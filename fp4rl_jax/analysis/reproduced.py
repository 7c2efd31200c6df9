"""Whether what a rollout recorded for the trainer is what each side computes of the same tokens."""

import dataclasses
from typing import Any

from fp4rl_jax import ops
from fp4rl_jax.analysis import forced
from fp4rl_jax.analysis.checks import capture_of
from fp4rl_jax.arrays import PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.models import ModelConfig, kv, routing
from fp4rl_jax.ops.spec import Side


def reproduced(
    published: PyTree,
    fused: PyTree,
    out: Rollouts,
    *,
    config: ModelConfig,
    trainer: Side,
    rollout: Side,
    temperature: float,
) -> tuple[dict[str, PyTree], dict[str, PyTree], dict[str, PyTree]]:
    """The record, and the same by teacher forcing of either side.

    The rollout's side computes without a record. The trainer's follows it where it is guided; it leaves out
    what it does not quantize in the rollout's format.

    Args:
        published: fused tree of the rollout. fused: the trainer's.
        out: the rollouts with their `guidance`. config, trainer, rollout, temperature: static.

    Returns:
        The record without the KV cache's static scales, the rollout's and the trainer's: {name: leaves
        [B, T, L, ...]} each; all empty where nothing is recorded.
    """
    record = {name: tree for name, tree in (out.guidance or {}).items() if name != kv.SCALES}
    if not record:
        return {}, {}, {}
    watch: Any = "choices" if routing.RECORD in record else "off"
    common: dict[str, Any] = {"config": config, "temperature": temperature, "watch": watch}
    again = forced.by_blocks(
        published, out, forced.scales_of(out.guidance), side=dataclasses.replace(rollout, replay="off"),
        capture=rollout.specs.capture, **common,
    )  # fmt: skip
    followed = forced.by_blocks(
        fused, out, out.guidance, side=trainer, capture=capture_of(trainer, rollout), **common
    )
    return record, _named(again), _named(followed)


def _named(found: forced.Forced) -> dict[str, PyTree]:
    experts = {} if found.experts is None else {routing.RECORD: found.experts}
    return dict(found.captured) | experts


def follows(trainer: Side) -> bool:
    """Whether some rounding of the trainer looks at a record."""
    quantizers = [spec.act for _, spec in trainer.specs.items] + [trainer.kv]
    return any(q is not None and q != ops.unguided(q) for q in quantizers)
