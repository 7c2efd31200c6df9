"""RLOO (arXiv 2402.14740): the baseline of a completion is the mean reward of its group's others.

    A_i = r_i - mean of r_j, j != i
    loss = mean over sequences of sum over tokens of -rho A w

REINFORCE on whole sequences: no clip, and a sequence's loss is the sum over its tokens. With
`old_logprobs` (more than one update of a rollout) rho corrects each token; at the first it is 1.
"""

import dataclasses

import jax.numpy as jnp

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import advantages
from fp4rl_jax.objectives.means import Sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.BaseConfig):
    """RLOO has no setting but `kl_coef`."""


def _against_others(rewards: Array, rollouts: Rollouts, config: Config) -> Array:
    del config
    return advantages.leave_one_out(rewards, group_size=rollouts.group_size)


def _by_token(trainer_logprobs: Array, batch: TrainBatch, config: Config) -> _common.TokenLoss:
    del config
    ratio = _common.token_ratio(trainer_logprobs, batch)
    nowhere = jnp.zeros_like(batch.loss_mask)
    return _common.TokenLoss(-ratio * batch.advantages[:, None], ratio, nowhere)


def _sum_of_tokens(token_loss: Array, batch: TrainBatch, config: Config) -> Sums:
    del config
    return _common.reduced(token_loss, batch, mean="sequences", length=1)


validate = _common.validate_group
prepare = _common.prepare_with(_against_others, validate=validate)
loss = _common.loss_with(_by_token, mean=_sum_of_tokens)
wanted = _common.keep_all
