"""The loop owns the order of a step and of a run: publish, collect, learn, record, save."""

from fp4rl_jax.loop.bound import Bound
from fp4rl_jax.loop.collect import Collected, Collector, collect
from fp4rl_jax.loop.config import EvalConfig, LoopConfig
from fp4rl_jax.loop.run import Job, NonFiniteRunError, run
from fp4rl_jax.loop.sync import Parts, Step, compile_updates, learn, train_step

__all__ = [
    "Bound",
    "Collected",
    "Collector",
    "EvalConfig",
    "Job",
    "LoopConfig",
    "NonFiniteRunError",
    "Parts",
    "Step",
    "collect",
    "compile_updates",
    "learn",
    "run",
    "train_step",
]
