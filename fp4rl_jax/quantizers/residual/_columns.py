"""Selections of whole columns (channels, or blocks of them): by score, by ratio, and when."""

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array, check_name
from fp4rl_jax.formats._base import once
from fp4rl_jax.quantizers.residual._base import Selection, largest, number_kept, ordered_sum, runs, top

Score = Literal["l2", "max", "act_max"]
Scope = Literal["static", "call", "token"]


@struct.dataclass
class ChannelStats:
    """What is known of the channels of one site's input over many tokens.

    Attributes:
        energy: [..., K] float32, mean over tokens of the squared residual.
        residual_max: [..., K] float32, largest magnitude of the residual.
        act_max: [..., K] float32, largest magnitude of the activation.
    """

    energy: Array
    residual_max: Array
    act_max: Array


def channel_stats(residual: Array, x: Array, mask: Array) -> ChannelStats:
    """Statistics of one call.

    Args:
        residual, x: [M, K] float32. mask: [M] bool, the rows that count.

    Returns:
        ChannelStats with [K] leaves; zeros where no row counts.
    """
    rows = mask[:, None]
    residual, x = jnp.where(rows, residual, 0.0), jnp.where(rows, x, 0.0)
    count = jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(jnp.float32)
    return ChannelStats(
        energy=jnp.sum(residual * residual, axis=0) / count,
        residual_max=jnp.max(jnp.abs(residual), axis=0, initial=0.0),
        act_max=jnp.max(jnp.abs(x), axis=0, initial=0.0),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(Selection):
    """Keeps the units (see the subclass) with the largest score.

    Attributes:
        ratio: share of the units kept, in (0, 1]; the nearest number of units, at least one.
        score: "l2" of the residual over the unit (and the tokens), "max" of its magnitude, or
            "act_max" of the activation's.
        scope: "static" takes columns chosen at publish from running statistics, so that a token's
            result does not depend on its batch; "call" chooses over the tokens of each call (padding
            among them); "token" within each token.
        decay: of the running statistics, a params version: new = decay * old + (1 - decay) * seen.

    A ragged last block is never kept: a row must hold at least one whole unit.
    """

    ratio: float = 0.5
    score: Score = "l2"
    scope: Scope = "static"
    decay: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"ratio of a residual selection must be in (0, 1], got {self.ratio}")
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay of running statistics must be in [0, 1), got {self.decay}")
        check_name("score", self.score, get_args(Score))
        check_name("scope", self.scope, get_args(Scope))

    def unit(self, block: int) -> int:
        """Columns that are kept or dropped together."""
        raise NotImplementedError

    @property
    def batch_invariant(self) -> bool:
        return self.scope != "call"

    @property
    def needs_columns(self) -> bool:
        return self.scope == "static"

    def kept_share(self, length: int, block: int) -> float:
        return self.num_columns(length, block) / length

    def num_columns(self, length: int, block: int) -> int:
        """How many columns of a row of `length` are kept."""
        unit = self.unit(block)
        units = length // unit
        if not units:
            raise ValueError(f"a row of {length} values holds no whole unit of {unit} columns to select")
        return unit * number_kept(self.ratio, units)

    def choose(self, stats: ChannelStats, *, block: int) -> Array:
        """Columns [..., k] int32, ascending, with the largest score in `stats` ([..., K] leaves)."""
        return self._best(self._by_channel(stats), block)

    def chosen(self, residual: Array, x: Array, *, block: int) -> Array:
        """Columns of this call: [k], or [M, k] with scope "token"; arguments as in `mask`."""
        return self._best(self._seen(residual, x, block), block)

    def mask(self, residual: Array, x: Array, *, block: int) -> Array:
        scores, unit = self._scores(self._seen(residual, x, block), block), self.unit(block)
        kept = once(largest(once(scores), self.num_columns(x.shape[-1], block) // unit))
        kept = jnp.repeat(jnp.atleast_2d(kept), unit, axis=-1)
        return jnp.pad(kept, ((0, 0), (0, x.shape[-1] - kept.shape[-1])))  # no ragged last unit

    def _seen(self, residual: Array, x: Array, block: int) -> Array:
        """What this call's scores are made of, a channel: [K], or [M, K] with scope "token"."""
        if self.scope == "static":
            raise ValueError(f"selection {self.name} with scope='static' is chosen at publish, not by a call")
        if self.scope == "call":
            return self._by_channel(channel_stats(residual, x, jnp.ones(len(x), bool)))
        value = jnp.abs(x if self.score == "act_max" else residual)
        return value * value if self.score == "l2" else value

    def _by_channel(self, stats: ChannelStats) -> Array:
        return {"l2": stats.energy, "max": stats.residual_max, "act_max": stats.act_max}[self.score]

    def _scores(self, per_channel: Array, block: int) -> Array:
        """[..., K] -> [..., units], whole units only."""
        length, unit = per_channel.shape[-1], self.unit(block)
        whole = runs(per_channel[..., : length // unit * unit], unit)  # [..., units, unit]
        return ordered_sum(whole) if self.score == "l2" else jnp.max(whole, axis=-1)

    def _best(self, per_channel: Array, block: int) -> Array:
        length, unit = per_channel.shape[-1], self.unit(block)
        best = top(self._scores(per_channel, block), self.num_columns(length, block) // unit)
        return (best[..., None] * unit + jnp.arange(unit)).reshape(*best.shape[:-1], -1)
