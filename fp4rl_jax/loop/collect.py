"""Collecting a step's rollouts: sample, score with the task, resample groups that teach nothing."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, concatenate_rows, take_rows
from fp4rl_jax.parallel import of_first
from fp4rl_jax.runs import RunError, exit_codes


class RewardFn(Protocol):
    """A task's reward: see `tasks`."""

    def __call__(self, item: Any, completion: str) -> Any: ...


class NoGroupsError(RunError):
    """The sampling rounds of a step gave too few groups that the algorithm can learn from."""

    exit_code = exit_codes.TASK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collector:
    """How prompts become scored rollouts.

    Attributes:
        draw: the next `num_prompts` task items, in data order; moves the data position.
        encode: items -> (prompts [P, Tp] int32, prompt_mask [P, Tp] bool), left-padded.
        sample: (published, prompts, prompt_mask, key) -> Rollouts.
        decode: token ids of one completion -> text.
        reward: the task's.
        wanted: rewards [P, G] -> [P] bool, groups worth training on.
        num_prompts, group_size, max_rounds: as in `LoopConfig`.
    """

    draw: Callable[[], Sequence[Any]]
    encode: Callable[[Sequence[Any]], tuple[np.ndarray, np.ndarray]]
    sample: Callable[[Any, np.ndarray, np.ndarray, Array], Rollouts]
    decode: Callable[[list[int]], str]
    reward: RewardFn
    wanted: Callable[[np.ndarray], Any]
    num_prompts: int
    group_size: int
    max_rounds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collected:
    """Scored rollouts of one step.

    Attributes:
        rollouts: of `num_prompts * group_size` rows.
        items: the task item of every prompt.
        completions: the text of every row.
        rewards: [B] float32.
        correct: [B] bool, the answer is right, whatever else is rewarded.
        parts: by name, [B] float32: the reward's parts.
        rounds: sampling rounds used.
        sampled_tokens: tokens sampled, dropped groups included.
    """

    rollouts: Rollouts
    items: tuple[Any, ...]
    completions: tuple[str, ...]
    rewards: np.ndarray
    correct: np.ndarray
    parts: dict[str, np.ndarray]
    rounds: int
    sampled_tokens: int


def collect(published: Any, key: Array, collector: Collector) -> Collected:
    """Samples until the step has its groups.

    Args:
        published: the rollout parameters, of one version.
        key: typed PRNG key of the step; a round's key is folded in from it.
        collector: the parts.

    Raises:
        NoGroupsError: `max_rounds` rounds did not give enough groups that the algorithm wants.
    """
    kept: list[Collected] = []
    sampled = 0
    for number in range(collector.max_rounds):
        found = _round(published, jax.random.fold_in(key, number), collector)
        sampled += found.sampled_tokens
        groups = np.flatnonzero(np.asarray(collector.wanted(found.rewards.reshape(-1, collector.group_size))))
        kept.append(_take_groups(found, groups, collector.group_size))
        if sum(len(part.items) for part in kept) >= collector.num_prompts:
            return _join(kept, collector, rounds=number + 1, sampled=sampled)
    have = sum(len(part.items) for part in kept)
    raise NoGroupsError(
        f"{collector.max_rounds} sampling rounds gave {have} groups of mixed reward, {collector.num_prompts} "
        "are needed: raise loop.max_rounds, or choose a task that the policy sometimes solves"
    )


def _round(published: Any, key: Array, collector: Collector) -> Collected:
    items = tuple(collector.draw())
    prompts, prompt_mask = collector.encode(items)
    rollouts = jax.device_get(collector.sample(published, prompts, prompt_mask, key))
    sampled = zip(rollouts.tokens, rollouts.loss_mask, strict=True)
    completions = tuple(collector.decode(row[mask].tolist()) for row, mask in sampled)
    owners = [item for item in items for _ in range(collector.group_size)]
    found = [collector.reward(item, text) for item, text in zip(owners, completions, strict=True)]
    names = sorted({name for reward in found for name in reward.parts})
    scores = {
        "rewards": np.array([reward.value for reward in found], np.float32),
        "correct": np.array([reward.correct for reward in found], bool),
        "parts": {n: np.array([reward.parts[n] for reward in found], np.float32) for n in names},
    }
    return Collected(
        **of_first(scores),  # a reward may look at a clock
        rollouts=rollouts,
        items=items,
        completions=completions,
        rounds=1,
        sampled_tokens=int(rollouts.loss_mask.sum()),
    )


def _take_groups(found: Collected, groups: np.ndarray, group_size: int) -> Collected:
    rows = (groups[:, None] * group_size + np.arange(group_size)).reshape(-1)
    return dataclasses.replace(
        found,
        rollouts=take_rows(found.rollouts, rows),
        items=tuple(found.items[g] for g in groups),
        completions=tuple(found.completions[r] for r in rows),
        rewards=found.rewards[rows],
        correct=found.correct[rows],
        parts={name: values[rows] for name, values in found.parts.items()},
    )


def _join(kept: list[Collected], collector: Collector, *, rounds: int, sampled: int) -> Collected:
    """Joins the rounds' groups and cuts them to the asked number."""
    joined = dataclasses.replace(
        kept[0],
        rollouts=concatenate_rows([part.rollouts for part in kept]),
        items=tuple(item for part in kept for item in part.items),
        completions=tuple(text for part in kept for text in part.completions),
        rewards=np.concatenate([part.rewards for part in kept]),
        correct=np.concatenate([part.correct for part in kept]),
        parts={n: np.concatenate([part.parts[n] for part in kept]) for n in kept[0].parts},
    )
    cut = _take_groups(joined, np.arange(collector.num_prompts), collector.group_size)
    return dataclasses.replace(cut, rounds=rounds, sampled_tokens=sampled)
