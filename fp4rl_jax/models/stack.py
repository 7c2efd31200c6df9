"""The scan over stacked layers, cut where training starts and where hints begin."""

import dataclasses
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fp4rl_jax import ops
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.models import guidance
from fp4rl_jax.models.blocks import Attend, SiteCalls, Stats, Tokens, layer
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.models.params import num_stacked
from fp4rl_jax.models.routing import Watch
from fp4rl_jax.objectives.means import add_sums
from fp4rl_jax.ops.spec import Capture, MatmulSpec, Side
from fp4rl_jax.parallel import BATCH, constrain

Remat = Literal["none", "layer"]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Consecutive layers that one scan runs: `count` of a stack, from its layer `offset`."""

    stack: PyTree
    offset: int
    first: int
    count: int
    frozen: bool

    @property
    def whole(self) -> bool:
        return self.count == num_stacked(self.stack)


def _pieces(layers: PyTree, trainable_from: int, cuts: frozenset[int] = frozenset()) -> list[_Piece]:
    """Cuts the stack(s) of layers where training starts, and before the layers in `cuts`."""
    stacks = layers if isinstance(layers, tuple) else (layers,)
    total = sum(num_stacked(stack) for stack in stacks)
    if not 0 <= trainable_from <= total:
        raise ValueError(f"trainable_from must be in 0..{total} layers, got {trainable_from}")
    pieces, first = [], 0
    for stack in stacks:
        end = first + num_stacked(stack)
        inside = {cut for cut in cuts | {trainable_from} if first < cut < end}
        for begin, stop in pairwise(sorted({first, end} | inside)):
            pieces.append(_Piece(stack, begin - first, begin, stop - begin, begin < trainable_from))
        first = end
    return pieces


@dataclasses.dataclass(frozen=True)
class Run:
    """What all layers of a call share."""

    attend: Attend
    tokens: Tokens
    config: ModelConfig
    side: Side
    stats: Stats
    remat: Remat
    watch: Watch = "off"
    capture: Capture | None = None

    def body(self, carry: Any, weights: PyTree, scanned: Any) -> tuple[Any, Any]:
        """One layer as a scan body: carry (x, state) -> (carry, ((kept, watched, captured), stats))."""
        x, state = carry
        x = constrain(x, BATCH, self.side.layout)
        extra, key, hint = scanned
        calls = SiteCalls(
            self.side, key=key, hint=hint, stats=self.stats, watch=self.watch, capture=self.capture
        )
        x, kept, state = layer(
            x,
            weights,
            calls,
            attend=self.attend,
            tokens=self.tokens,
            config=self.config,
            extra=extra,
            state=state,
        )
        return (x, state), ((kept, calls.watched, calls.captured), calls.found)

    def frozen(self, carry: Any, piece: _Piece, scanned: Any) -> tuple[Any, Any]:
        """Runs layers without gradient: nothing is saved, and the weights are read in place."""
        carry, stack, scanned = jax.lax.stop_gradient((carry, piece.stack, scanned))

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            index, scanned = xs
            weights = jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack
            )
            return self.body(carry, weights, scanned)

        return jax.lax.scan(body, carry, (piece.offset + jnp.arange(piece.count), scanned))

    def trained(self, carry: Any, piece: _Piece, scanned: Any) -> tuple[Any, Any]:
        """Runs layers that may be differentiated, recomputing each in the backward if asked."""
        stack = piece.stack
        if not piece.whole:
            stack = jax.tree.map(lambda leaf: leaf[piece.offset : piece.offset + piece.count], stack)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            return self.body(carry, *xs)

        if self.remat == "layer":
            body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(body, carry, (stack, scanned))


def run_layers(
    x: Array,
    layers: PyTree,
    run: Run,
    *,
    state: PyTree,
    extra: PyTree,
    key: Array | None,
    hint: PyTree,
    trainable_from: int,
) -> tuple[Array, PyTree, PyTree, PyTree]:
    """Runs all layers; returns (x, state, (kept, watched, captured) stacked over L, stats).

    A hint whose leaves have fewer than L layers is for the deepest ones. Counts are summed over L,
    statistics of inputs are stacked over L.
    """
    hint, num_layers = hint or {}, run.config.num_layers
    keys = None if key is None else jax.random.split(key, num_layers)
    cuts = frozenset(guidance.by_layers(hint, num_layers).values())
    carry, kept, stats = (x, state), [], []
    for piece in _pieces(layers, trainable_from, cuts):
        last = piece.first + piece.count
        shared = jax.tree.map(lambda leaf, a=piece.first, b=last: leaf[a:b], (extra, keys))
        scanned = (*shared, guidance.of_layers(hint, num_layers, first=piece.first, last=last))
        step = run.frozen if piece.frozen else run.trained
        carry, (kept_here, stats_here) = step(carry, piece, scanned)
        kept.append(kept_here)
        stats.append(stats_here)
    joined = jax.tree.map(lambda *parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts), *kept)
    if not isinstance(run.stats, str):
        return carry[0], carry[1], joined, jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats)
    return carry[0], carry[1], joined, _together(stats, run.side)


def _together(parts: list[PyTree], side: Side) -> PyTree:
    """{site: {operand: sums}} over the layers of all pieces.

    A piece whose weights came prepared has not counted them.
    """
    kept: dict[str, list[ops.Kept]] = {}
    counted: list[PyTree] = []
    for part in parts:
        counted.append({})
        for site, found in part.items():
            if isinstance(found, ops.Kept):
                kept.setdefault(site, []).append(found)
            else:
                counted[-1][site] = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), found)
    parts = [*counted, {site: _count(found, side.specs[site]) for site, found in kept.items()}]
    total: dict[str, dict[str, PyTree]] = {}
    for part in parts:
        for site, operands in part.items():
            found = total.setdefault(site, {})
            for operand, sums in operands.items():
                found[operand] = add_sums(found[operand], sums) if operand in found else sums
    return total


def _count(kept: list[ops.Kept], spec: MatmulSpec) -> dict[str, PyTree]:
    """The sums of a site's kept tokens, [layers, m, K] of every piece."""
    assert spec.act is not None  # or nothing was kept
    every = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *kept)
    return {"act": ops.kept_stats(every, ops.unguided(spec.act))}
