"""`fp4rl check`: whether a configuration's two sides keep what they promise, before a run depends on it."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from fp4rl_jax.analysis import checks, forced
from fp4rl_jax.analysis.checks import Finding, Observed
from fp4rl_jax.analysis.reproduced import reproduced
from fp4rl_jax.cli import _experiment, _failures, _flags
from fp4rl_jax.cli._experiment import Case
from fp4rl_jax.data import Prompts
from fp4rl_jax.loop.sync import train_step
from fp4rl_jax.models import routing
from fp4rl_jax.rollout import weight_checksums
from fp4rl_jax.runs import exit_codes
from fp4rl_jax.tasks import Reward

SUMMARY = "check that a configuration's two sides keep what they promise; non-zero exit if not"

#: Steps of the run with learning rate zero.
STEPS = 3


def main(argv: Sequence[str]) -> int:
    """Prints a line a check; `exit_codes.CHECK` where one that applies does not hold."""
    values = _flags.config_flags()
    _experiment.define_flags(values)
    _flags.parse(values, argv, name="check", summary=SUMMARY)
    config = _flags.load_config(values)

    with _failures.settings():
        case = _experiment.draw(_experiment.in_kept_order(_experiment.bounded(config, values)))
    findings = []
    for finding in run(case):
        print(finding, flush=True)
        findings.append(finding)
    return exit_codes.CHECK if checks.findings_failed(findings) else exit_codes.OK


def run(case: Case) -> Iterator[Finding]:
    """Every check of a case, one after the other; the last consumes the case's state."""
    yield weight_codes(case)
    yield prefill(case)
    yield ratio(case)
    yield from records(case)
    yield flat(case)


def weight_codes(case: Case) -> Finding:
    """The codes in the published tree against those that the trainer's forward makes."""
    sides = case.made.sides
    return checks.weight_codes(
        checks.used_checksums(case.published.params),
        weight_checksums(case.params, config=case.made.model, side=sides.trainer),
        trainer_side=sides.trainer,
        rollout_side=sides.rollout,
    )


def prefill(case: Case) -> Finding:
    """The rollout's tokens in blocks against the same one by one."""
    side = case.made.sides.rollout
    found = forced.by_blocks(
        case.published.params, case.rollouts, forced.scales_of(case.rollouts.guidance),
        config=case.made.model, side=side, temperature=case.made.learner.temperature,
    )  # fmt: skip
    return checks.prefill_is_decode(found.logprobs, case.rollouts, side)


def ratio(case: Case) -> Finding:
    """The trainer's log-probs against the sampler's."""
    sides = case.made.sides
    return checks.ratio_is_one(
        case.scores, case.rollouts, trainer_side=sides.trainer, rollout_side=sides.rollout
    )


def records(case: Case) -> list[Finding]:
    """Guidance and routing: what was recorded, against both sides by teacher forcing."""
    sides, out = case.made.sides, case.rollouts
    record, again, followed = reproduced(
        case.published.params, case.trainer_tree, out, config=case.made.model,
        trainer=sides.trainer, rollout=sides.rollout, temperature=case.made.learner.temperature,
    )  # fmt: skip
    expected = "records equal, token by token and layer by layer"
    findings = []
    for name, why, names in (
        ("guidance reproduces", "the recipe records no codes", [n for n in record if n != routing.RECORD]),
        ("routing reproduces", "no experts are recorded (moe.replay, or a dense model)", [routing.RECORD]),
    ):
        names = [n for n in names if n in record]
        if not names:
            findings.append(checks.absent(name, expected=expected, reason=why))
            continue
        some, ours, theirs = ({n: tree[n] for n in names if n in tree} for tree in (record, followed, again))
        findings.append(
            checks.records_reproduce(
                name,
                some,
                trainer=ours,
                rollout=theirs,
                trainer_side=sides.trainer,
                rollout_side=sides.rollout,
            )
        )
    return findings


def flat(case: Case) -> Finding:
    """Steps of the run's own loop with learning rate zero; the case's state is donated to the first."""
    made, state = case.made, case.state
    data = Prompts(made.task.train, made.config.loop.num_prompts, seed=made.config.run.seed)
    parts = made.parts(data, state)
    values = itertools.cycle((0.0, 1.0))  # every group teaches, whatever the policy can do
    collector = dataclasses.replace(
        parts.collector,
        draw=lambda: case.items,
        reward=lambda item, text: Reward(value=next(values), correct=False),
        wanted=lambda rewards: np.ones(len(rewards), bool),
    )
    parts = dataclasses.replace(parts, collector=collector, observe=None, renew=None)
    steps = []
    for _ in range(STEPS):
        state, step = train_step(state, 0, parts)
        assert step.collected is not None  # it sampled
        out = step.collected.rollouts
        steps.append(
            Observed(
                tokens=out.tokens, loss_mask=out.loss_mask, rollout_logprobs=out.rollout_logprobs,
                trainer_logprobs=step.trainer_logprobs,
            )
        )  # fmt: skip
    return checks.gap_is_flat(steps)
