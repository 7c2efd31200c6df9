"""From a configuration to the parts of a run: the one place where everything meets."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from fp4rl_jax import interchange, models
from fp4rl_jax.arrays import Array
from fp4rl_jax.batch import Rollouts, TrainBatch
from fp4rl_jax.cli import _devices
from fp4rl_jax.config import Config
from fp4rl_jax.data import Prompts
from fp4rl_jax.loop import Bound, Collector, Job, Parts, compile_updates
from fp4rl_jax.loop.record import residual_row
from fp4rl_jax.models import guidance
from fp4rl_jax.ops import machine
from fp4rl_jax.ops.cost import residual_cost
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.parallel import Layout
from fp4rl_jax.parallel.memory import require_host_memory
from fp4rl_jax.rollout import (
    Checksums,
    Evaluation,
    Evaluator,
    Frozen,
    Published,
    SamplingConfig,
    abstract_published,
    calibrate,
    compare_checksums,
    evaluate,
    lower_evaluation,
    lower_sample,
    publish,
    publish_frozen,
    row_keys,
    sample,
    weight_checksums,
)
from fp4rl_jax.runs import RunDirectory, build_manifest, precision
from fp4rl_jax.tasks import Item, Task
from fp4rl_jax.text import Tokenizer, byte_tokenizer, encode_prompts
from fp4rl_jax.trainer import (
    Learner,
    TrainState,
    abstract_state,
    backbone,
    init_state,
    place,
    plan,
    score_batch,
)

_score = jax.jit(score_batch, static_argnames="learner")
_backbone = jax.jit(backbone, static_argnames=("model", "side"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides:
    """Both sides of a configuration for one model."""

    trainer: Side
    rollout: Side


def sides(config: Config, model: models.ModelConfig, layout: Layout | None = None) -> Sides:
    """Resolves both recipes over the sites of `model`, on the mesh of `layout`.

    Raises:
        ValueError: a recipe's pattern matches no site of this model, what one side records does not guide
            the other, this machine does not keep `ops.order` or has no host memory for guidance, or the mesh
            would cut a block or a head.
    """
    machine.require_order(config.ops.order, machine.current())
    if config.trainer.guidance_memory == "host":
        require_host_memory(jax.devices()[0])
    names = models.sites(model)
    trainer, rollout = config.recipe.trainer, config.recipe.rollout
    ours = trainer.module.trainer(trainer.config)
    theirs = rollout.module.rollout(rollout.config)
    config.moe.require(model)
    specs, other = ours.resolve(names), theirs.resolve(names)
    common: dict[str, Any] = {
        "order": config.ops.order,
        "fused_attention": config.ops.fused_attention,
        "replay": config.moe.replay,
        "layout": layout,
    }
    found = Sides(
        trainer=Side(specs=specs, dtype=config.trainer.dtype, kv=ours.kv, **common),
        rollout=Side(specs=other, dtype=config.rollout.dtype, kv=theirs.kv, **common),
    )
    guidance.check_guidance(found.trainer, found.rollout)
    for name, side in (("trainer", found.trainer), ("rollout", found.rollout)):
        models.require_whole_blocks(model, side, name=name)
    return found


def model_shape(config: Config) -> models.ModelConfig:
    """The model's description, without reading weights."""
    return config.model.shape if config.model.path is None else interchange.load_config(config.model.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds a run's parts from its configuration; the fields are what they share.

    Attributes:
        config, model, sides, tokenizer, task: as named.
        key: root key of the run.
        learner: the learning side.
        sampling: of training rollouts.
    """

    config: Config
    model: models.ModelConfig
    sides: Sides
    tokenizer: Tokenizer
    task: Task
    key: Array
    learner: Learner
    sampling: SamplingConfig

    def params(self) -> Any:
        """The master tree: the checkpoint's, or a random one drawn from the run's seed."""
        layout = self.sides.trainer.layout
        places = None if layout is None else models.shardings(self.model, layout.mesh, rules=layout.rules)
        if self.config.model.path is None:
            return models.init_params(self.model, jax.random.fold_in(self.key, 0), shardings=places)
        dtype = self.config.trainer.master_dtype
        return interchange.load(self.config.model.path, dtype=dtype, shardings=places).params

    def state(self, data: Prompts | None = None) -> TrainState:
        """The first state; `data` gives the prompts of the first batch where the rollout calibrates."""
        places = None
        if self.sides.trainer.layout is not None:
            places = jax.tree.map(lambda leaf: leaf.sharding, self.template(calibrated=False))
        state = init_state(self.params(), self.learner.subset, self.config.trainer, shardings=places)
        if data is None or not calibrate.is_needed(self.sides.rollout):
            return state
        place = data.get_state()
        prompts, mask = self.encode(next(data))
        data.set_state(place)
        found = calibrate.first(
            state.params, jnp.asarray(prompts), jnp.asarray(mask), config=self.model, side=self.sides.rollout
        )
        return dataclasses.replace(state, calibration=found)

    def template(self, *, calibrated: bool = True) -> TrainState:
        """Shapes of the state, on a mesh with their shardings, to restore a checkpoint into.

        Args:
            calibrated: whether the run samples, hence has the calibration that its rollout asks for.
        """
        shapes = models.abstract_params(self.model)
        state = abstract_state(shapes, self.learner.subset, self.config.trainer)
        side = self.sides.rollout
        if calibrated and calibrate.is_needed(side):
            empty = jax.eval_shape(lambda: calibrate.empty(self.model, side))
            state = dataclasses.replace(state, calibration=empty)
        if side.layout is None:
            return state
        places = models.params_shardings(state, self.model, side.layout)
        return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), state, places)

    def parts(self, data: Prompts, state: TrainState) -> Parts:
        """The parts of a step, for a run whose frozen parameters are those of `state`."""
        base = self.base(state)
        publish = self.publisher(state)
        publish(state)  # compiles it here, beside the other programs
        return Parts(
            learner=self.learner,
            collector=self.collector(data),
            publish=publish,
            prepare=self.prepare,
            clipped=Bound(self.config.correction.module.clipped, self.config.correction.config),
            reference=self.reference(base),
            base=base,
            key=jax.random.fold_in(self.key, 1),
            observe=self.observe if calibrate.is_observed(self.sides.rollout) else None,
            renew=partial(calibrate.renewed, side=self.sides.rollout)
            if calibrate.is_needed(self.sides.rollout)
            else None,
        )

    def base(self, state: TrainState) -> Any:
        """The trainer's `backbone`, for a run whose frozen parameters are those of `state`."""
        return _backbone(state.frozen, model=self.model, side=self.sides.trainer)

    def prepare(self, rollouts: Rollouts, rewards: Any, reference: Array | None) -> TrainBatch:
        """What the algorithm trains on."""
        algorithm = self.config.algorithm
        return algorithm.module.prepare(rollouts, rewards, algorithm.config, ref_logprobs=reference)

    def observe(self, published: Published, rollouts: Rollouts) -> tuple[Any, dict[str, float]]:
        """Looks at the rollout's activations on one completion of every group."""
        every = rollouts.group_size
        seen, recovered = calibrate.observe(
            published,
            rollouts.tokens[::every],
            rollouts.token_mask[::every],
            config=self.model,
            side=self.sides.rollout,
        )
        cost = residual_cost(
            self.sides.rollout,
            models.site_shapes(self.model),
            num_active=max(self.model.num_active, 1),
        )
        return seen, residual_row(recovered) | cost

    def publisher(self, first: TrainState) -> Callable[[TrainState], Published]:
        """`publish` for the states of one run, whose frozen parameters, those of `first`, it does once."""
        parts, side = first.untrained, self.sides.trainer
        if not parts:
            return self.publish
        frozen = publish_frozen(parts, config=self.model, side=self.sides.rollout)
        below = None
        if "layers" in parts:
            below = weight_checksums({"layers": parts["layers"]}, config=self.model, side=side)
        return partial(self.publish, frozen=frozen, below=below)

    def publish(
        self, state: TrainState, *, frozen: Frozen | None = None, below: Checksums | None = None
    ) -> Published:
        """Publishes the state's parameters and holds both sides' weight codes against each other."""
        params, sides = state.params, self.sides
        published = publish(
            params,
            config=self.model,
            side=sides.rollout,
            version=state.params_version,
            calibration=state.calibration,
            frozen=frozen,
        )
        ours = weight_checksums(params, config=self.model, side=sides.trainer, below=below)
        compare_checksums(published.checksums, ours, rollout_side=sides.rollout, trainer_side=sides.trainer)
        return published

    def reference(self, base: Any) -> Callable[[Rollouts], Array] | None:
        """Log-probs of the parameters that the run began with, where the algorithm needs them."""
        if not self.config.algorithm.config.needs_reference:
            return None
        first = self.state()
        layout = self.sides.trainer.layout

        def score(rollouts: Rollouts) -> Array:
            placed, held = place(rollouts, self.config.trainer, layout)
            return _score(first, placed, base, held, learner=self.learner)

        return score

    def collector(self, data: Prompts) -> Collector:
        """Prompts to scored rollouts."""
        loop, algorithm = self.config.loop, self.config.algorithm
        return Collector(
            draw=lambda: next(data),
            encode=self.encode,
            sample=self.sample,
            decode=self.decode,
            reward=self.task.reward,
            wanted=Bound(algorithm.module.wanted, algorithm.config),
            num_prompts=loop.num_prompts,
            group_size=loop.group_size,
            max_rounds=loop.max_rounds,
        )

    def encode(self, items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
        """Left-padded chat prompts of the configured width."""
        return encode_prompts(
            self.tokenizer,
            [item.messages for item in items],
            width=self.config.rollout.prompt_width,
            names=[item.key for item in items],
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, special tokens left out."""
        return self.tokenizer.decode(ids)

    def sample(self, published: Published, prompts: np.ndarray, mask: np.ndarray, key: Array) -> Rollouts:
        """One round of training rollouts, keyed per row."""
        return sample(published, jnp.asarray(prompts), jnp.asarray(mask), **self._sampled(len(prompts), key))

    def _sampled(self, num_prompts: int, key: Array) -> dict[str, Any]:
        """What `sample` is told of a round beside its prompts."""
        rows = num_prompts * self.config.loop.group_size
        return {
            "row_limits": jnp.full(rows, self.sampling.max_new_tokens, jnp.int32),
            "keys": row_keys(key, jnp.arange(rows, dtype=jnp.int32)),
            "config": self.model,
            "side": self.sides.rollout,
            "sampling": self.sampling,
            "group_size": self.config.loop.group_size,
            "stats": self.config.ops.stats,
        }

    def compile_tasks(self, state: TrainState) -> Sequence[Callable[[], object]]:
        """Functions that compile a step's programs and the evaluation's.

        None on a mesh, or where guidance waits in host memory: those programs are compiled by their first
        call.

        Args:
            state: one of the run; its shapes are read at once.
        """
        if self.sides.rollout.layout is not None or self.config.trainer.guidance_memory == "host":
            return ()
        shapes = _abstract(state)
        evaluation = self.evaluated()

        def published() -> Published:
            side, seen = self.sides.rollout, shapes.calibration
            return abstract_published(
                shapes.params, config=self.model, side=side, calibration=seen, parts=shapes.untrained
            )

        def step() -> None:
            """One after the other: an update's compilation takes more memory than all others together."""
            sampler, rollouts = self.lowered_sample(published())
            sampler.compile()
            base = _backbone.eval_shape(shapes.frozen, model=self.model, side=self.sides.trainer)
            compile_updates(shapes, self.blank_batch(rollouts), base, learner=self.learner)

        tasks: list[Callable[[], object]] = [step]
        if evaluation is not None:
            items, key, evaluator = evaluation
            tasks.append(lambda: lower_evaluation(published(), items, key, evaluator=evaluator).compile())
        return tasks

    def lowered_sample(self, published: Published) -> tuple[jax.stages.Lowered, Rollouts]:
        """The sampler's program of one round, and the shapes of its rollouts."""
        prompts = np.zeros((self.config.loop.num_prompts, self.config.rollout.prompt_width), np.int32)
        return lower_sample(
            published,
            jnp.asarray(prompts),
            jnp.ones(prompts.shape, bool),
            **self._sampled(len(prompts), self.key),
        )

    def blank_batch(self, rollouts: Rollouts) -> TrainBatch:
        """A batch like those that updates take, made from the shapes of rollouts."""
        blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rollouts)
        needs_reference = self.config.algorithm.config.needs_reference
        reference = jnp.zeros(blank.tokens.shape, jnp.float32) if needs_reference else None
        return self.prepare(blank, np.zeros(len(blank.tokens), np.float32), reference)

    def evaluated(self) -> tuple[list[Item], Array, Evaluator] | None:
        """What is evaluated: held-out problems, the key and how; None if turned off."""
        settings = self.config.eval
        if not settings.problems:
            return None
        if settings.problems > len(self.task.eval):
            raise ValueError(
                f"eval.problems = {settings.problems}: the task has {len(self.task.eval)} held-out problems"
            )
        evaluator = Evaluator(
            encode=self.encode,
            decode=self.decode,
            reward=self.task.reward,
            config=self.model,
            side=self.sides.rollout.without_capture(),
            sampling=dataclasses.replace(self.sampling, temperature=settings.temperature, num_candidates=0),
            batch_prompts=min(settings.batch_prompts, settings.problems),
            num_samples=settings.samples,
        )
        items = [self.task.eval[i] for i in range(settings.problems)]
        return items, jax.random.fold_in(self.key, 2), evaluator

    def evaluation(
        self, publish: Callable[[TrainState, Any], Published]
    ) -> Callable[[TrainState, Any], Evaluation] | None:
        """Evaluates the rollout policy of a state on held-out problems, or None if turned off.

        Args:
            publish: (state, the step's parts) -> published parameters.
        """
        found = self.evaluated()
        if found is None:
            return None
        items, key, evaluator = found
        return lambda state, parts: evaluate(publish(state, parts), items, key, evaluator=evaluator)

    def manifest(self, start: int) -> dict[str, Any]:
        """What the run folder says of this process and its numerics."""
        both = {"trainer": self.sides.trainer, "rollout": self.sides.rollout}
        return build_manifest(
            seed=self.config.run.seed,
            implementations=precision.implementations(both, self.model),
            numerics={
                name: {
                    "dtype": side.dtype,
                    "order": side.order,
                    "kv": "none" if side.kv is None else side.kv.fmt.name,
                }
                for name, side in both.items()
            },
            start_step=start,
        )


def _abstract(tree: Any) -> Any:
    """Shapes and dtypes alone."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def builder(config: Config, layout: Layout | None = None) -> Builder:
    """Everything that needs no weights: the model's shape, both sides, tokenizer, task, learner."""
    model = model_shape(config)
    tokenizer = _tokenizer(config)
    both = sides(config, model, layout)
    sampling = dataclasses.replace(
        config.rollout.sampling(stop_tokens=tokenizer.stop_ids, pad_token=tokenizer.pad_id),
        num_candidates=getattr(config.correction.config, "num_candidates", 0),
    )
    if sampling.num_candidates > model.vocab_size:
        raise ValueError(
            f"correction.num_candidates = {sampling.num_candidates}: the vocabulary has "
            f"{model.vocab_size} tokens"
        )
    shapes = models.abstract_params(model)
    learner = Learner(
        model=model,
        side=both.trainer,
        config=config.trainer,
        subset=plan(shapes, config.trainer.trainable, num_layers=model.num_layers),
        loss=Bound(config.algorithm.module.loss, config.algorithm.config),
        weights=Bound(config.correction.module.weights, config.correction.config),
        temperature=config.rollout.temperature,
        triage=config.triage,
        stats=config.ops.stats,
        balance_coef=config.moe.balance_coef,
    )
    return Builder(
        config=config,
        model=model,
        sides=both,
        tokenizer=tokenizer,
        task=config.task.module.build(config.task.config),
        key=jax.random.key(config.run.seed),
        learner=learner,
        sampling=sampling,
    )


def job(config: Config, directory: RunDirectory) -> Job:
    """The job that `loop.run` runs.

    Raises:
        ValueError: the model, a recipe or the task does not fit the configuration.
        PromptError: a prompt is wider than rollout.prompt_width.
    """
    made = builder(config, _devices.layout(config))
    require_fit(made)
    data = Prompts(made.task.train, config.loop.num_prompts, seed=config.run.seed)
    logging.info("model: %d parameters", models.num_parameters(made.model))
    return Job(
        directory=directory,
        steps=config.loop.steps,
        make_state=partial(made.state, data),
        template=made.template(),
        make_parts=partial(made.parts, data),
        data=data,
        evaluate=made.evaluation(lambda state, parts: parts.publish(state)),
        eval_every=config.eval.every,
        manifest=made.manifest,
        compile_tasks=made.compile_tasks,
    )


#: Prompts of the training side whose width is looked at before the run begins: two seconds of encoding.
CHECKED_PROMPTS = 20_000


def require_fit(made: Builder) -> None:
    """Refuses, before any device works, sequences too long for the model and prompts too wide.

    Raises:
        ValueError: prompt and completion together are longer than the model's max_length.
        PromptError: a prompt is empty or wider than rollout.prompt_width; of a training side of more than
            `CHECKED_PROMPTS` items those behind are looked at when their turn comes.
    """
    rollout, most = made.config.rollout, made.model.max_length
    if rollout.prompt_width + rollout.max_new_tokens > most:
        raise ValueError(
            f"rollout.prompt_width = {rollout.prompt_width} and rollout.max_new_tokens = "
            f"{rollout.max_new_tokens}: their sum is more than the model's max_length of {most}"
        )
    sides = (
        (made.task.train, min(len(made.task.train), CHECKED_PROMPTS)),
        (made.task.eval, min(len(made.task.eval), made.config.eval.problems)),
    )
    for source, count in sides:
        for first in range(0, count, 256):
            made.encode([source[index] for index in range(first, min(first + 256, count))])


def _tokenizer(config: Config) -> Tokenizer:
    if config.model.path is not None:
        return interchange.load_tokenizer(config.model.path)
    tokenizer = byte_tokenizer()
    if config.model.shape.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.shape.vocab_size = {config.model.shape.vocab_size}: the byte tokenizer needs "
            f"at least {tokenizer.vocab_size}"
        )
    return tokenizer
