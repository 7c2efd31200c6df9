"""Scores a published policy on task items: greedy, mean@k and pass@k with confidence intervals."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.rollout.choose import row_keys
from fp4rl_jax.rollout.config import SamplingConfig
from fp4rl_jax.rollout.estimators import Estimate, bootstrap_mean, pass_curve
from fp4rl_jax.rollout.publish import Published
from fp4rl_jax.rollout.sampler import lower_sample, sample
from fp4rl_jax.tasks import Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Everything an evaluation needs beside the parameters and the items.

    Attributes:
        encode: items -> (prompts [P, Tp] int32, prompt_mask [P, Tp] bool), of one fixed width.
        decode: token ids of one completion -> text.
        reward: (item, completion) -> the task's checked Reward; `correct` is what passes.
        config, side, sampling: as in `sample`; greedy or sampled.
        batch_prompts: prompts a call; a short last batch is filled up, so one program serves all.
        num_samples: completions an item, 1 when greedy.

    Raises:
        ValueError: more than one greedy sample an item, or a non-positive number.
    """

    encode: Callable[[Sequence[Any]], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[list[int]], str]
    reward: Callable[[Any, str], Reward]
    config: ModelConfig
    side: Side
    sampling: SamplingConfig
    batch_prompts: int
    num_samples: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_prompts", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.sampling.is_greedy and self.num_samples != 1:
            raise ValueError(
                f"greedy decoding gives equal samples: num_samples must be 1, got {self.num_samples}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What came out, item by item.

    Attributes:
        items: N task items.
        completions: per item, `num_samples` texts.
        rewards: [N, num_samples] float32.
        correct: [N, num_samples] bool.
        finished: [N, num_samples] bool, ended by a stop token.
        lengths: [N, num_samples] int32, sampled tokens.
        params_version: the version that was evaluated.
    """

    items: tuple[Any, ...]
    completions: tuple[tuple[str, ...], ...]
    rewards: np.ndarray
    correct: np.ndarray
    finished: np.ndarray
    lengths: np.ndarray
    params_version: int

    @property
    def scores(self) -> np.ndarray:
        """[N] float64: share of each item's samples that are correct; for paired comparisons."""
        return self.correct.mean(axis=1)

    def mean_at_k(self, *, seed: int = 0) -> Estimate:
        """Mean share of correct samples (mean@k = pass@1), k = num_samples."""
        if self.correct.shape[1] == 1:
            return pass_curve(self.correct, (1,), seed=seed)[1]
        return bootstrap_mean(self.scores, seed=seed)

    def pass_at(self, ks: tuple[int, ...], *, seed: int = 0) -> dict[int, Estimate]:
        """pass@k for each k, unbiased, averaged over items."""
        return pass_curve(self.correct, ks, seed=seed)

    def record(self) -> dict[str, Any]:
        """pass@1 as a run's `evals.jsonl` has it (docs/RUNS.md), step and name apart."""
        found = self.mean_at_k()
        bounds = {"value": found.value, "low": found.low, "high": found.high}
        return {"metric": "pass@1", **bounds, "count": len(self.items)}

    def mean_reward(self, *, seed: int = 0) -> Estimate:
        """Mean reward over items and samples, items resampled for the interval."""
        return bootstrap_mean(self.rewards.mean(axis=1), seed=seed)


def evaluate(published: Published, items: Sequence[Any], key: Array, *, evaluator: Evaluator) -> Evaluation:
    """Samples every item `num_samples` times and scores the completions.

    Args:
        published: the policy.
        items: task items; their order and the batch size do not change any item's samples.
        key: typed PRNG key; a sample's key is folded in from it by item and sample number.
        evaluator: how.

    Raises:
        ValueError: there are no items.
        RewardError: a reward could not be computed or is not finite; it names the prompt.
    """
    if not items:
        raise ValueError("nothing to evaluate: expected at least one task item, got 0")
    rows = []
    for first in range(0, len(items), evaluator.batch_prompts):
        chunk = list(items[first : first + evaluator.batch_prompts])
        rollouts = _sample_chunk(published, chunk, key, evaluator=evaluator, first=first)
        rows += _score_chunk(rollouts, chunk, evaluator)
    shape = (len(items), evaluator.num_samples)
    texts = [row[0] for row in rows]
    grouped = [tuple(texts[i : i + shape[1]]) for i in range(0, len(texts), shape[1])]
    return Evaluation(
        items=tuple(items),
        completions=tuple(grouped),
        rewards=np.array([row[1] for row in rows], np.float32).reshape(shape),
        correct=np.array([row[2] for row in rows], bool).reshape(shape),
        finished=np.array([row[3] for row in rows], bool).reshape(shape),
        lengths=np.array([row[4] for row in rows], np.int32).reshape(shape),
        params_version=int(published.version),
    )


def lower_evaluation(
    published: Published, items: Sequence[Any], key: Array, *, evaluator: Evaluator
) -> jax.stages.Lowered:
    """The program that `evaluate` samples with, before it is compiled; `published` may be abstract."""
    chunk = list(items[: evaluator.batch_prompts])
    lowered, _ = lower_sample(published, **_chunk_arguments(chunk, key, evaluator=evaluator, first=0))
    return lowered


def _sample_chunk(
    published: Published, chunk: list[Any], key: Array, *, evaluator: Evaluator, first: int
) -> Rollouts:
    """Rollouts of one chunk, filled up to the fixed batch with rows that sample nothing."""
    rollouts = sample(published, **_chunk_arguments(chunk, key, evaluator=evaluator, first=first))
    return jax.device_get(rollouts)


def _chunk_arguments(chunk: list[Any], key: Array, *, evaluator: Evaluator, first: int) -> dict[str, Any]:
    missing = evaluator.batch_prompts - len(chunk)
    prompts, prompt_mask = evaluator.encode(chunk + chunk[:1] * missing)
    group, rows = evaluator.num_samples, evaluator.batch_prompts * evaluator.num_samples
    limits = np.full(rows, evaluator.sampling.max_new_tokens, np.int32)
    limits[len(chunk) * group :] = 0
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "row_limits": limits,
        "keys": row_keys(key, first * group + np.arange(rows, dtype=np.int32)),
        "config": evaluator.config,
        "side": evaluator.side,
        "sampling": evaluator.sampling,
        "group_size": group,
    }


def _score_chunk(rollouts: Rollouts, chunk: list[Any], evaluator: Evaluator) -> list[tuple]:
    """(text, reward, correct, finished, length) of every real row of a chunk."""
    found = []
    for row in range(len(chunk) * evaluator.num_samples):
        item = chunk[row // evaluator.num_samples]
        mask = rollouts.loss_mask[row]
        text = evaluator.decode(np.asarray(rollouts.tokens[row])[np.asarray(mask)].tolist())
        reward = evaluator.reward(item, text)
        found.append((text, reward.value, reward.correct, rollouts.finished[row], mask.sum()))
    return found
