"""What has to hold of a configuration's two sides, each as one finding (`fp4rl check`).

A check is a pure function of what both sides computed. Where the configuration itself lets the two differ,
the reason is the finding: "not applicable", with what was seen.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models, ops
from fp4rl_jax.arrays import PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.ops.spec import MatmulSpec, Side
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Quantizer
from fp4rl_jax.rollout import Checksums, PublishError, compare_checksums
from fp4rl_jax.rollout.checksums import qtensor_checksums

Status = Literal["ok", "FAILED", "not applicable"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check says.

    Attributes:
        name: of the check.
        status: "not applicable" is no failure.
        seen, expected: in words and figures.
        reason: why it does not apply; empty where it does.
    """

    name: str
    status: Status
    seen: str
    expected: str
    reason: str = ""

    def __str__(self) -> str:
        line = f"{self.name}: {self.status}; seen: {self.seen}; expected: {self.expected}"
        return f"{line}; because {self.reason}" if self.reason else line


def _found(name: str, holds: bool, *, seen: str, expected: str, reasons: Sequence[str] = ()) -> Finding:
    """The finding of an equality that the configuration promises unless there are reasons against it."""
    status: Status = "ok" if holds else "FAILED"
    if reasons and not holds:
        return Finding(
            name=name, status="not applicable", seen=seen, expected=expected, reason="; ".join(reasons)
        )
    return Finding(name=name, status=status, seen=seen, expected=expected)


def absent(name: str, *, expected: str, reason: str) -> Finding:
    """The finding of a check of which there is nothing to look at."""
    return Finding(name=name, status="not applicable", seen="nothing", expected=expected, reason=reason)


def order_reasons(side: Side) -> list[str]:
    """Why two programs of one side may differ: a free order of sums, or codes that depend on other tokens."""
    found = []
    if side.order == "free":
        found.append("ops.order = 'free' lets two programs add in different orders")
    mixing = [site for site, spec in side.specs.items if not spec.batch_invariant]
    if mixing:
        found.append(f"the codes of a token depend on others in its call at {', '.join(mixing)}")
    return found


def pair_reasons(trainer: Side, rollout: Side) -> list[str]:
    """Why the two sides' log-probs of the same tokens may differ; empty where their ratio must be 1.

    Guidance is no reason: by the codes of an equal computation it changes nothing.
    """
    found = order_reasons(rollout)
    if trainer.dtype != rollout.dtype:
        found.append(f"trainer.dtype = {trainer.dtype!r}, rollout.dtype = {rollout.dtype!r}")
    for part in ("weight", "act", "residual", "smoothing"):
        sites = [
            site
            for site, spec in rollout.specs.items
            if _part(spec, part) != _part(trainer.specs[site], part)
        ]
        if sites:
            found.append(f"{part} differs at {', '.join(sites)}")
    if _unguided(trainer.kv) != _unguided(rollout.kv):
        found.append("the KV caches differ")
    return found


def _part(spec: MatmulSpec, name: str) -> Any:
    value = getattr(spec, name)
    return _unguided(value) if isinstance(value, Quantizer) else value


def _unguided(quantizer: Quantizer | None) -> Quantizer | None:
    return None if quantizer is None else ops.unguided(quantizer)


def used_checksums(params: PyTree) -> Checksums:
    """Checksums of the packed weights of a published tree: site -> part -> [L, ...].

    `Published.checksums` were taken while publishing; these are of what the sampler is given now.
    """
    found: dict[str, list] = {}

    def look(site: str, weight: Any) -> Any:
        inner = weight.weight if isinstance(weight, ops.Calibrated) else weight
        if isinstance(inner, QTensor):
            sums = qtensor_checksums
            for _ in range(inner.ndim - 2):
                sums = jax.vmap(sums)
            found.setdefault(site, []).append(jax.jit(sums)(inner))
        return weight

    models.map_sites(look, params)
    return {site: jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts) for site, parts in found.items()}


def weight_codes(
    rollout: Checksums, trainer: Checksums, *, trainer_side: Side, rollout_side: Side
) -> Finding:
    """Both sides' weight codes, scales and outer scales, where their recipes mean the same ones.

    Args:
        rollout: of the published parameters, e.g. `used_checksums`. trainer: `rollout.weight_checksums`.
        trainer_side, rollout_side: to know where they mean the same.
    """
    name, expected = "weight codes equal after publish", "equal at every site that both sides quantize alike"
    try:
        verdicts = compare_checksums(rollout, trainer, rollout_side=rollout_side, trainer_side=trainer_side)
    except PublishError as error:
        return Finding(name=name, status="FAILED", seen=str(error), expected=expected)
    equal = [site for site, verdict in verdicts.items() if verdict == "equal"]
    if equal:
        return Finding(name=name, status="ok", seen=f"equal at {', '.join(equal)}", expected=expected)
    reason = "; ".join(f"{site}: {verdict}" for site, verdict in verdicts.items())
    return absent(name, expected=expected, reason=reason or "neither side quantizes a weight")


def prefill_is_decode(blocks: Any, out: Rollouts, side: Side) -> Finding:
    """The rollout's log-probs in blocks [B, T] against those that it recorded one token at a time."""
    holds, seen = _compared(blocks, out.rollout_logprobs, out.loss_mask)
    return _found(
        "prefill = decode", holds, seen=seen, expected="equal bit for bit", reasons=order_reasons(side)
    )


def ratio_is_one(scores: Any, out: Rollouts, *, trainer_side: Side, rollout_side: Side) -> Finding:
    """The trainer's log-probs [B, T] against the rollout's, where both sides compute one function."""
    holds, seen = _compared(scores, out.rollout_logprobs, out.loss_mask)
    reasons = pair_reasons(trainer_side, rollout_side)
    return _found("ratio = 1", holds, seen=seen, expected="1 at every token, exactly", reasons=reasons)


def _compared(first: Any, second: Any, mask: Any) -> tuple[bool, str]:
    """Whether two [B, T] log-prob arrays are equal on the mask, and by how much they differ."""
    a, b = (np.asarray(x, np.float64)[np.asarray(mask)] for x in (first, second))
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return False, "log-probs that are not finite"
    gap = np.abs(a - b)
    if not gap.any():
        return bool(gap.size), f"equal at {gap.size} tokens"
    return False, f"{(gap > 0).mean():.1%} of {gap.size} tokens differ, by at most {gap.max():.2e} nats"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """One step of a run that does not learn: tokens [B, T] and both sides' log-probs of them."""

    tokens: Any
    loss_mask: Any
    rollout_logprobs: Any
    trainer_logprobs: Any

    @property
    def gap(self) -> float:
        """Mean absolute log-prob gap, nats a token."""
        mask = np.asarray(self.loss_mask)
        ours, theirs = (
            np.asarray(x, np.float64)[mask] for x in (self.trainer_logprobs, self.rollout_logprobs)
        )
        return float(np.abs(ours - theirs).mean())


def gap_is_flat(steps: Sequence[Observed]) -> Finding:
    """Steps of a run with learning rate zero, on the same prompts and keys: nothing may move.

    Every step publishes, samples, scores and updates anew; what differs would be state that leaks from one
    version to the next.
    """
    first = jax.tree.leaves(dataclasses.asdict(steps[0]))
    moved = [
        number
        for number, step in enumerate(steps)
        if any(
            not np.array_equal(np.asarray(a), np.asarray(b))
            for a, b in zip(first, jax.tree.leaves(dataclasses.asdict(step)), strict=True)
        )
    ]
    seen = "mean gap " + ", ".join(f"{step.gap:.6g}" for step in steps) + " nats"
    if moved:
        seen += f"; tokens or log-probs of step {', '.join(map(str, moved))} differ from step 0"
    return _found(
        "flat gap at learning rate 0", not moved, seen=seen, expected=f"{len(steps)} equal steps, bit for bit"
    )


def records_reproduce(
    name: str, record: PyTree, *, rollout: PyTree, trainer: PyTree, trainer_side: Side, rollout_side: Side
) -> Finding:
    """What the rollout recorded, against what each side computes of the same tokens once more.

    Args:
        name: of the check, e.g. "guidance reproduces".
        record: {name: leaves [B, T, L, ...]}, as the trainer is given it.
        rollout: the same by teacher forcing of the rollout's side; [B, T, L, ...].
        trainer: the same by the trainer's side, which follows the record; may lack names.
        trainer_side, rollout_side: to know what may differ.
    """
    again, followed = _differing(record, rollout), _differing(record, trainer)
    seen = f"rollout anew: {_shares(again)}; trainer: {_shares(followed)}"
    stale = any(share > 0 for share in again.values())
    reasons = order_reasons(rollout_side) if stale else pair_reasons(trainer_side, rollout_side)
    holds = not stale and not any(share > 0 for share in followed.values())
    expected = "records equal, token by token and layer by layer"
    return _found(name, holds, seen=seen, expected=expected, reasons=reasons)


def _differing(record: dict[str, Any], found: dict[str, Any]) -> dict[str, float]:
    """{name: share of (row, column, layer) whose records differ}, of the names that were found."""
    shares = {}
    for name, tree in found.items():
        wrong: Any = False
        for a, b in zip(jax.tree.leaves(record[name]), jax.tree.leaves(tree), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            wrong = wrong | (a != b).reshape(*a.shape[:3], -1).any(axis=-1)
        shares[name] = float(np.mean(wrong))
    return shares


def _shares(found: dict[str, float]) -> str:
    if not found:
        return "nothing to compare"
    return ", ".join(f"{name} equal" if not x else f"{name} {x:.2%} differ" for name, x in found.items())


def capture_of(trainer: Side, rollout: Side) -> Any:
    """The rollout's capture, cut to what the trainer quantizes in the same format, or None."""
    capture = rollout.specs.capture
    if capture is None:
        return None
    sites = tuple(
        site for site in capture.sites if _same_format(trainer.specs[site].act, rollout.specs[site].act)
    )
    form = capture.kv if _same_format(trainer.kv, rollout.kv) else None
    return dataclasses.replace(capture, sites=sites, kv=form) if sites or form else None


def _same_format(ours: Quantizer | None, theirs: Quantizer | None) -> bool:
    return ours is not None and theirs is not None and ours.fmt == theirs.fmt


def findings_failed(findings: Sequence[Finding]) -> bool:
    """Whether a check that applies does not hold."""
    return any(found.status == "FAILED" for found in findings)
