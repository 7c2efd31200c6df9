"""Which component opens the log-prob gap between trainer and rollout: each swapped in, and each swapped out.

Definitions, with f(S) the log-probs of the rollouts' tokens where the components of S are the rollout's:

    opened(c) = gap(f({c}), f({}))                                      swapped in
    closed(c) = gap(f(all), f({})) - gap(f(all - {c}), f({}))           swapped out
    rest      = gap(recorded, f(all)) and gap(trainer's scores, f({}))  what no component explains
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from fp4rl_jax.analysis.swaps import COMPONENTS, Pair, corrects_alone, mixed, standing

#: A mean gap below this, nats, is float32 rounding: nothing is named.
FLOOR = 1e-5
MOVED = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """How two sets of log-probs of the same tokens differ.

    Attributes:
        mean, largest: of the absolute difference, nats.
        k3: mean of exp(l) - l - 1, l = first - second, nats a token.
        moved: share of tokens that differ by more than 0.01 nat.
        tokens: how many were compared.
    """

    mean: float
    largest: float
    k3: float
    moved: float
    tokens: int


def gap(first: Any, second: Any, mask: Any) -> Gap:
    """Compares two [B, T] arrays of log-probs where `mask` [B, T] is True.

    Raises:
        ValueError: one of them is not finite there, or nothing is compared.
    """
    a, b = (np.asarray(x, np.float64)[np.asarray(mask)] for x in (first, second))
    if not a.size or not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(f"expected finite log-probs of at least one token, got {a.size} tokens: {a}, {b}")
    diff = a - b
    return Gap(
        mean=float(np.abs(diff).mean()),
        largest=float(np.abs(diff).max()),
        k3=float(np.mean(np.exp(diff) - diff - 1)),
        moved=float(np.mean(np.abs(diff) > MOVED)),
        tokens=int(diff.size),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swap:
    """One component.

    Attributes:
        component: its name.
        status: "measured"; "same": the sides do not differ in it; "not applicable": neither has it.
        reason: why nothing was measured, in either column.
        opened: by swapping it into the trainer; None where nothing was measured.
        left: between the rollout without it and the trainer; None likewise.
        closed: nats a token, what of the explained gap's mean goes with it; None likewise, below 0 where the
            component holds the sides together.
    """

    component: str
    status: Literal["measured", "same", "not applicable"]
    reason: str = ""
    opened: Gap | None = None
    left: Gap | None = None
    closed: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attribution:
    """The gap and its parts.

    Attributes:
        total: between what the rollout recorded and the trainer's own scores.
        explained: between f(all) and f({}).
        swaps: one a component.
        rest_rollout, rest_trainer: what is left to the record with everything swapped in, and to the
            trainer's scores with everything swapped out.
    """

    total: Gap
    explained: Gap
    swaps: tuple[Swap, ...]
    rest_rollout: Gap
    rest_trainer: Gap

    @property
    def interaction_in(self) -> float:
        """The explained mean gap less the sum of what the components open, nats a token."""
        return self.explained.mean - math.fsum(s.opened.mean for s in self.swaps if s.opened is not None)

    @property
    def interaction_out(self) -> float:
        """The explained mean gap less the sum of what the components close, nats a token."""
        return self.explained.mean - math.fsum(s.closed for s in self.swaps if s.closed is not None)

    @property
    def named(self) -> str:
        """What opens the gap: the component that closes most, the "unexplained rest", or "nothing"."""
        rest = max(self.rest_rollout.mean, self.rest_trainer.mean)
        closing = {s.component: s.closed for s in self.swaps if s.closed is not None}
        best = max(closing, key=lambda name: closing[name], default=None)
        if max(self.total.mean, rest) <= FLOOR:
            return "nothing"
        return "unexplained rest" if best is None or rest > closing[best] else best

    @property
    def opens_most(self) -> str:
        """The component that opens most by itself, or "nothing"."""
        opening = {s.component: s.opened.mean for s in self.swaps if s.opened is not None}
        best = max(opening, key=lambda name: opening[name], default=None)
        return best if best is not None and opening[best] > FLOOR else "nothing"


def attribute(pair: Pair, scores: Any) -> Attribution:
    """Swaps every component in which the sides differ, in and out.

    Args:
        pair: both sides, and the rollouts.
        scores: [B, T] float32, nats, the trainer's own log-probs of them.

    Returns:
        Attribution. Programs: two for every component that differs, and two.
    """
    known: dict[frozenset[str], np.ndarray] = {}
    stands = standing(pair)
    differing = frozenset(name for name, (status, _) in stands.items() if status == "differs")
    mask = pair.out.loss_mask

    def at(chosen: frozenset[str]) -> np.ndarray:
        if chosen not in known:
            known[chosen] = mixed(pair, chosen)
        return known[chosen]

    none: frozenset[str] = frozenset()
    explained = gap(at(differing), at(none), mask)
    swaps = []
    for name in COMPONENTS:
        status, reason = stands[name]
        if status != "differs":
            swaps.append(Swap(component=name, status=status, reason=reason))
            continue
        alone = name != "residual" or corrects_alone(pair)
        left = gap(at(differing - {name}), at(none), mask)
        swaps.append(
            Swap(
                component=name,
                status="measured",
                reason="" if alone else "in: the trainer has no quantized activation to correct",
                opened=gap(at(frozenset({name})), at(none), mask) if alone else None,
                left=left,
                closed=explained.mean - left.mean,
            )
        )
    return Attribution(
        total=gap(pair.out.rollout_logprobs, scores, mask),
        explained=explained,
        swaps=tuple(swaps),
        rest_rollout=gap(pair.out.rollout_logprobs, at(differing), mask),
        rest_trainer=gap(scores, at(none), mask),
    )
