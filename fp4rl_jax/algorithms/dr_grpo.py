"""Dr.GRPO (arXiv 2503.20783): GRPO without its two biases.

    A = r - mean over the group                      (no division by the standard deviation)
    loss = mean over sequences of [sum over tokens of -min(rho A, clip(rho, 1 -+ clip) A) w] / length

`length` is one constant, the maximum completion length, so long wrong answers are not favoured.
"""

import dataclasses

from fp4rl_jax.algorithms import _common
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.objectives import advantages
from fp4rl_jax.objectives.means import Sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_common.ClippedConfig):
    """Dr.GRPO's settings.

    Attributes:
        length: the constant; None takes the completion width of the batch, i.e. the configured
            maximum number of new tokens.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _common.require_positive(length=1 if self.length is None else self.length)


def _centered(rewards: Array, rollouts: Rollouts, config: Config) -> Array:
    del config
    return advantages.group_centered(rewards, group_size=rollouts.group_size)


def _over_constant(token_loss: Array, batch: TrainBatch, config: Config) -> Sums:
    length = _common.completion_width(batch) if config.length is None else config.length
    return _common.reduced(token_loss, batch, mean="sequences", length=length)


validate = _common.validate_group
prepare = _common.prepare_with(_centered, validate=validate)
loss = _common.loss_with(_common.surrogate, mean=_over_constant)
wanted = _common.keep_all
