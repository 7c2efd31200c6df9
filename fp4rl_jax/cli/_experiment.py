"""What `fp4rl check` and `fp4rl mismatch` look at: a configuration's first rollouts."""

import dataclasses
import functools
from typing import Any

import jax
from absl import flags

from fp4rl_jax import models
from fp4rl_jax.arrays import PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.cli import _flags, _job
from fp4rl_jax.config import Config
from fp4rl_jax.data import Prompts
from fp4rl_jax.ops import machine
from fp4rl_jax.rollout import Published, publish
from fp4rl_jax.trainer import TrainState, score_batch

_score = jax.jit(score_batch, static_argnames="learner")


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags that bound how much is computed."""
    flags.DEFINE_integer("num_prompts", 4, "at most as many prompts of the task", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 16, "at most as many tokens a completion", flag_values=values)


def bounded(config: Config, values: flags.FlagValues) -> Config:
    """The configuration with fewer prompts and shorter completions, one device, and learning rate zero.

    The group size stays; `trainer.microbatch_rows` stays where it still divides the rows and is below them
    where it was, and is otherwise a group.

    Raises:
        ValueError: a flag is below 1.
    """
    limits = {name: _flags.get(values, name, int) for name in ("num_prompts", "max_new_tokens")}
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"--{name} = {value}: expected at least 1")
    prompts = min(config.loop.num_prompts, limits["num_prompts"])
    trainer = dataclasses.replace(
        config.trainer,
        updates_per_rollout=1,
        guidance_memory="device",
        microbatch_rows=_rows(config, prompts * config.loop.group_size),
        optim=dataclasses.replace(config.trainer.optim, lr=0.0, schedule="constant", warmup_steps=0),
    )
    length = min(config.rollout.max_new_tokens, limits["max_new_tokens"])
    return dataclasses.replace(
        config,
        trainer=trainer,
        loop=dataclasses.replace(config.loop, num_prompts=prompts, max_rounds=1),
        rollout=dataclasses.replace(config.rollout, max_new_tokens=length),
        ops=dataclasses.replace(config.ops, stats="off"),
    )


def _rows(config: Config, batch: int) -> int | None:
    """Rows that the trainer runs at a time, of a batch of `batch`."""
    rows, update = (
        config.trainer.microbatch_rows,
        config.loop.num_prompts // config.trainer.updates_per_rollout,
    )
    if rows is None or rows == update * config.loop.group_size:
        return None
    if batch % rows == 0 and rows < batch:
        return rows
    group = config.loop.group_size
    return group if group < batch else 1


def in_kept_order(config: Config) -> Config:
    """The configuration in the fixed order of sums, in which equalities are exact, where it is kept."""
    kept = machine.current().platform in machine.FIXED_ORDER_PLATFORMS
    return dataclasses.replace(config, ops=dataclasses.replace(config.ops, order="fixed")) if kept else config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration's first rollouts.

    Attributes:
        made: the run's parts. state, published, rollouts: of version 0.
        scores: [B, T] float32, nats, the trainer's of those rollouts, in its own geometry.
        items: the task's, a prompt each.
    """

    made: _job.Builder
    state: TrainState
    published: Published
    rollouts: Rollouts
    scores: Any
    items: tuple[Any, ...]

    @property
    def params(self) -> PyTree:
        """The master tree."""
        return self.state.params

    @functools.cached_property
    def trainer_tree(self) -> PyTree:
        """The trainer's parameters as its forward takes them."""
        return jax.jit(models.fuse)(self.params)


def draw(config: Config) -> Case:
    """Publishes, samples and scores once, as the first step of a run would.

    Both sides' weight codes are not compared here.

    Raises:
        ValueError: the model, a recipe or the task does not fit the configuration.
        PromptError, PublishError: of the prompts or the weights.
    """
    made = _job.builder(config)
    _job.require_fit(made)
    data = Prompts(made.task.train, config.loop.num_prompts, seed=config.run.seed)
    state = made.state(data)
    items = tuple(next(data))
    published = publish(
        state.params, config=made.model, side=made.sides.rollout, version=0, calibration=state.calibration
    )
    rollouts = made.sample(published, *made.encode(items), jax.random.fold_in(made.key, 1))
    return Case(
        made=made,
        state=state,
        published=published,
        rollouts=rollouts,
        scores=_score(state, rollouts, learner=made.learner),
        items=items,
    )
