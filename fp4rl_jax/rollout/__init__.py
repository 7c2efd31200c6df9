"""The reference sampler and the road from trainer parameters to rollout parameters.

`publish` -> `sample` -> `Rollouts`; `evaluate` scores a policy on a task.
"""

from fp4rl_jax.rollout import calibrate
from fp4rl_jax.rollout.choose import row_keys
from fp4rl_jax.rollout.config import RolloutConfig, SamplingConfig, refuse_for_training
from fp4rl_jax.rollout.evaluate import Evaluation, Evaluator, evaluate, lower_evaluation
from fp4rl_jax.rollout.publish import (
    Calibration,
    Checksums,
    Frozen,
    Published,
    PublishError,
    abstract_published,
    compare_checksums,
    publish,
    publish_frozen,
    weight_checksums,
)
from fp4rl_jax.rollout.sampler import lower_sample, sample

__all__ = [
    "Calibration",
    "Checksums",
    "Evaluation",
    "Evaluator",
    "Frozen",
    "PublishError",
    "Published",
    "RolloutConfig",
    "SamplingConfig",
    "abstract_published",
    "calibrate",
    "compare_checksums",
    "evaluate",
    "lower_evaluation",
    "lower_sample",
    "publish",
    "publish_frozen",
    "refuse_for_training",
    "row_keys",
    "sample",
    "weight_checksums",
]
