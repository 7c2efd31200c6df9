"""What the two sides exchange: rollouts going one way, training batches made from them.

Layout of every [B, T] array: `T = prompt_width + completion_width`. Columns before
`prompt_width` hold the prompt, LEFT-padded; the columns from there on hold the completion,
right-padded. The last prompt token is therefore always in column `prompt_width - 1`, a sequence
has no hole, and rows `p * group_size .. (p + 1) * group_size - 1` share prompt `p`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.objectives.means import Weighting, add_sums


@struct.dataclass
class Rollouts:
    """What a sampler returns.

    Attributes:
        tokens: [B, T] int32.
        token_mask: [B, T] bool, True on real tokens, prompt and completion alike.
        loss_mask: [B, T] bool, True on sampled tokens (the stop token included).
        rollout_logprobs: [B, T] float32, nats, at the sampling temperature; 0 off `loss_mask`.
            `rollout_logprobs[b, t]` scores `tokens[b, t]`.
        finished: [B] bool, True where the row ended by a stop token, not by its length limit.
        params_version: [] int32, the version that every token of the batch was sampled from.
        candidates, candidate_logprobs: [B, T, k] int32 and float32 nats, the sampler's likeliest tokens at
            every sampled column, or None where nothing asks for them.
        guidance: what the rollout spec's `capture` asked for, or None.
        stats: per-site quantization statistics of the sampler, over all that it sampled, or an empty dict.
        prompt_width: static, columns of the prompt part.
        group_size: static, completions per prompt.
        provenance: static, sorted (key, value) strings: recipe, dtype, order, implementations.
    """

    tokens: Array
    token_mask: Array
    loss_mask: Array
    rollout_logprobs: Array
    finished: Array
    params_version: Array
    candidates: Array | None = None
    candidate_logprobs: Array | None = None
    guidance: PyTree = None
    stats: PyTree = struct.field(default_factory=dict)
    prompt_width: int = struct.field(pytree_node=False, default=0)
    group_size: int = struct.field(pytree_node=False, default=1)
    provenance: tuple[tuple[str, Any], ...] = struct.field(pytree_node=False, default=())


@struct.dataclass
class TrainBatch:
    """What an algorithm's `prepare` makes of rollouts and rewards, and a train step consumes.

    Attributes:
        tokens, token_mask, loss_mask, rollout_logprobs: as in `Rollouts`.
        advantages: [B] float32, broadcast over T only in the loss.
        old_logprobs: [B, T] float32, the trainer's at the rollout's version; None on the first
            update of a rollout, where they equal the current ones by definition (ratio 1).
        ref_logprobs: [B, T] float32, a frozen reference's, or None without a KL term.
        candidates, candidate_logprobs: as in `Rollouts`.
        guidance: the rollout's, passed on as `hint`: by row and column like the tokens, packed or not.
        weighting: weights of the tokens' losses and their reduction, or None: the algorithm's own mean.
        segments: [B, T] int32, the example of each column where rows hold several, counted from 1, and 0 on
            padding; None in the layout above. Tokens see their own example alone.
        token_term: [B, T] float32, added to the tokens' losses; the trainer's, differentiated.
        prompt_width, group_size: static, as in `Rollouts`.
    """

    tokens: Array
    token_mask: Array
    loss_mask: Array
    rollout_logprobs: Array
    advantages: Array
    old_logprobs: Array | None = None
    ref_logprobs: Array | None = None
    candidates: Array | None = None
    candidate_logprobs: Array | None = None
    guidance: PyTree = None
    weighting: Weighting | None = None
    token_term: Array | None = None
    segments: Array | None = None
    prompt_width: int = struct.field(pytree_node=False, default=0)
    group_size: int = struct.field(pytree_node=False, default=1)


def take_rows(rollouts: Rollouts, rows: np.ndarray) -> Rollouts:
    """The rollouts of the given rows, in that order; leaves of host or device arrays alike.

    Args:
        rollouts: of B rows; every leaf of `guidance` has the rows first.
        rows: [N] int, row numbers; whole groups, so that the layout stays true.
    """
    return _over_rows(lambda x: x[rows], rollouts)


def concatenate_rows(parts: Sequence[Rollouts]) -> Rollouts:
    """Joins rollouts of one params version and one geometry along their rows; statistics are added.

    Raises:
        ValueError: the parts were sampled from different params versions.
    """
    versions = {int(part.params_version) for part in parts}
    if len(versions) != 1:
        raise ValueError(f"rollouts of different params versions {sorted(versions)} cannot be one batch")
    joined = _over_rows(lambda *xs: np.concatenate(xs), *parts)
    return dataclasses.replace(joined, stats=add_sums(*(part.stats for part in parts)))


def _over_rows(fn: Callable[..., Any], *parts: Rollouts) -> Rollouts:
    """Maps the leaves that have rows; `params_version` and `stats` stay the first part's."""
    first = parts[0]
    cut = [dataclasses.replace(part, params_version=None, stats=None) for part in parts]
    mapped: Rollouts = jax.tree.map(fn, *cut)
    return dataclasses.replace(mapped, params_version=first.params_version, stats=first.stats)
