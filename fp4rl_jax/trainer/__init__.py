"""The trainer: a pure update from (state, batch) to (state, outcome)."""

from fp4rl_jax.trainer.backbone import backbone
from fp4rl_jax.trainer.config import OptimConfig, TrainerConfig
from fp4rl_jax.trainer.state import TrainState, abstract_state, init_state
from fp4rl_jax.trainer.stream import device_bytes, place
from fp4rl_jax.trainer.subset import Subset, join_layers, merge, plan, split
from fp4rl_jax.trainer.update import Learner, Outcome, score_batch, update

__all__ = [
    "Learner",
    "OptimConfig",
    "Outcome",
    "Subset",
    "TrainState",
    "TrainerConfig",
    "abstract_state",
    "backbone",
    "device_bytes",
    "init_state",
    "join_layers",
    "merge",
    "place",
    "plan",
    "score_batch",
    "split",
    "update",
]
