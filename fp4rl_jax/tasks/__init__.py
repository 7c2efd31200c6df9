"""Verifiable tasks, one file each: prompts, and a reward for what a model answered.

Host Python without jax. Every file defines

* `Config`: frozen, hashable;
* `build(config) -> Task`: `train` and `eval` item sources that share no problem, and `reward`;
* `example_config(folder) -> Config`: a tiny instance for tests, its files written under `folder`.

The file name is the task's name in configs. To train on a reward function of your own without
adding a file, use the task `callable` (docs/TASKS.md).
"""

from fp4rl_jax.tasks._base import Item, Reward, RewardError, Source, Task

__all__ = ["Item", "Reward", "RewardError", "Source", "Task"]
