"""RL algorithms, one file each: rewards to advantages (`prepare`), log-probs to a loss (`loss`).

Every file defines

* `Config`: frozen, hashable; its defaults are the published setting; refuses values out of range;
  `needs_reference` says whether a frozen reference must score the rollouts before `prepare`;
* `validate(config, *, group_size)`: refuses a group size that cannot work, at configuration time;
* `prepare(rollouts, rewards, config, *, ref_logprobs=None) -> TrainBatch`;
* `loss(trainer_logprobs, batch, weights, config) -> Loss`: pure, jit-friendly (config static);
* `wanted(rewards, config)`: which groups [P] of rewards [P, group_size] are worth training on.

The file name is the algorithm's name in configs. None of them imports a sampler or a trainer.
"""

from fp4rl_jax.algorithms._common import Loss

__all__ = ["Loss"]
