"""The router of a mixture of experts: which experts a token takes, with which gates, and what is seen.

Scores, softmax and gates are float32 and never quantized. With a *record* (routing replay, arXiv
2510.11370) the experts of a token are those that the rollout took; the gates are still this side's own
scores of them, `mask * exp(score)` renormalised, so that the router keeps its gradient.

A record is [..., A] of an unsigned type, best expert first; `sentinel(dtype)`, the type's largest value,
stands where nothing was recorded (padding, the last token of a row), and such a token routes by itself.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.numerics import sum_last
from fp4rl_jax.ops.spec import HIGH_PRECISION, Order, Replay

#: The name of the record among a rollout's guidance and a forward's hints.
RECORD = "router"

#: What a forward returns of its routers: nothing, the choices, or the choices with load and entropy.
Watch = Literal["off", "choices", "all"]


@struct.dataclass
class Watched:
    """What a layer's router did; stacked over L by the scan. Padding counts nowhere.

    Attributes:
        experts: [..., A] int32, the experts taken, best first; of padding: meaningless.
        tokens: [] int32, real tokens.
        assigned: [E] int32, real tokens that took each expert.
        computed: [] int32, rows that the grouped matmuls were told to compute.
        prob_sum: [E] float32, the softmax summed over the real tokens; carries gradient.
        entropy_sum: [] float32 nats, the softmax's entropy summed over the real tokens.
        recorded: [] int32, real tokens with a record.
        changed: [] int32, those among them whose own set of experts differs from the record's.
    """

    experts: Array
    tokens: Array | None = None
    assigned: Array | None = None
    computed: Array | None = None
    prob_sum: Array | None = None
    entropy_sum: Array | None = None
    recorded: Array | None = None
    changed: Array | None = None


@struct.dataclass
class Routes:
    """The routing of M tokens.

    Attributes:
        gates: [M, A] float32; they sum to 1 under `norm_topk`.
        experts: [M, A] int32, best first, the lower index among equals; the record's where replayed.
        scores: [M, E] float32.
        own: [M, A] int32, what the scores alone would take.
        recorded: [M] bool, tokens that have a record.
    """

    gates: Array
    experts: Array
    scores: Array
    own: Array
    recorded: Array


def record_dtype(config: ModelConfig) -> np.dtype:
    """The smallest unsigned type that holds every expert and the sentinel."""
    return np.dtype(np.uint8 if config.num_experts <= 255 else np.uint16)


def sentinel(dtype: np.dtype) -> int:
    """The value that stands where nothing was recorded."""
    return int(np.iinfo(dtype).max)


def record_bytes(config: ModelConfig) -> int:
    """Bytes of a token's record over all layers."""
    return config.num_layers * config.num_active * record_dtype(config).itemsize


def route(
    h: Array,
    router: Array | ops.Prepared,
    *,
    config: ModelConfig,
    order: Order,
    record: Array | None = None,
    replay: Replay = "off",
) -> Routes:
    """Scores the experts in float32 and takes the best (Qwen3-MoE: softmax first, then top-k).

    Args:
        h: [M, D].
        router: [E, D], an array or prepared; widened to float32, exactly.
        record: [M, A] unsigned, or None.
        replay: "on" takes the record's experts, "measure" only compares.

    Exact: with a record of this side's own choices, the gates have the bits they have without one.
    """
    scores = ops.matmul(h.astype(jnp.float32), router, HIGH_PRECISION, order=order)
    best, own = jax.lax.top_k(scores, config.num_active)
    experts, recorded = own, jnp.zeros(h.shape[0], bool)
    if record is not None:
        recorded = record[:, 0] != sentinel(record.dtype)
        if replay == "on":
            experts = jnp.where(recorded[:, None], record.astype(jnp.int32), own)
            best = jnp.take_along_axis(scores, experts, axis=-1)
    # without renormalisation the softmax is over all experts, so the largest of all is taken off
    among = best if config.norm_topk else scores
    top = jax.lax.stop_gradient(jnp.max(among, axis=-1, keepdims=True))
    gates = ops.pointwise(jnp.exp, best - top, order=order)
    total = sum_last(
        gates if config.norm_topk else ops.pointwise(jnp.exp, scores - top, order=order), order=order
    )
    return Routes(gates=gates / total[:, None], experts=experts, scores=scores, own=own, recorded=recorded)


def watch(routes: Routes, real: Array, group_sizes: Array, record: Array | None, *, what: Watch) -> Watched:
    """What is reported of a layer's routing; `real` [M] bool, `group_sizes` those of the grouped matmuls."""
    if what != "all":
        return Watched(experts=routes.experts)
    probs = jax.nn.softmax(routes.scores, axis=-1)
    entropy = jax.scipy.special.entr(jax.lax.stop_gradient(probs)).sum(axis=-1)
    taken = jnp.sum(jax.nn.one_hot(routes.experts, probs.shape[-1], dtype=jnp.int32), axis=1)  # [M, E]
    recorded = routes.recorded & real
    changed = jnp.zeros([], jnp.int32)
    if record is not None:
        kept = jnp.sort(record.astype(jnp.int32), axis=-1) == jnp.sort(routes.own, axis=-1)
        changed = jnp.sum(recorded & ~jnp.all(kept, axis=-1), dtype=jnp.int32)
    return Watched(
        experts=routes.experts,
        tokens=jnp.sum(real, dtype=jnp.int32),
        assigned=jnp.sum(jnp.where(real[:, None], taken, 0), axis=0),
        computed=jnp.sum(group_sizes),
        prob_sum=jnp.sum(jnp.where(real[:, None], probs, 0.0), axis=0),
        entropy_sum=jnp.sum(jnp.where(real, entropy, 0.0)),
        recorded=jnp.sum(recorded, dtype=jnp.int32),
        changed=changed,
    )
