"""From a configuration to a supervised run, and from its last checkpoint to a model others can read."""

import dataclasses
from functools import partial
from pathlib import Path

import jax

from fp4rl_jax import interchange
from fp4rl_jax.arrays import PyTree, dtype_of
from fp4rl_jax.cli import _devices, _job
from fp4rl_jax.config import Config
from fp4rl_jax.corrections import none
from fp4rl_jax.data import Examples, Prompts, chat_items, encode_examples, pack_examples, require_answers
from fp4rl_jax.loop import Bound, Job
from fp4rl_jax.loop.supervised import SupervisedParts, negative_log_likelihood, supervised_step
from fp4rl_jax.objectives.triage import TriageConfig
from fp4rl_jax.parallel import constrain_whole
from fp4rl_jax.runs import RunDirectory
from fp4rl_jax.trainer import Learner, TrainState, join_layers


def job(config: Config, directory: RunDirectory, *, target: str) -> tuple[Job, _job.Builder]:
    """The job that `loop.run` runs, a step of which trains on num_prompts * group_size examples.

    Raises:
        ValueError: the configuration or the mesh does not fit, or the task has no answers.
        CheckpointError: no released family can express the model, so it could not be written.
        FileExistsError: `target` is there already.
    """
    if Path(target).exists():
        raise FileExistsError(f"{target} exists; choose another --output")
    made = _job.builder(config, _devices.layout(config))
    interchange.config_fields(made.model)
    made = dataclasses.replace(made, learner=supervised(made.learner))
    items = chat_items(config.sft.path) if config.sft.path else made.task.train
    require_answers(items[:1] if isinstance(items, list) else [items[0]])
    rows = config.loop.num_prompts * config.loop.group_size
    data = Prompts(items, 1 if config.sft.pack_width else rows, seed=config.run.seed)
    return (
        Job(
            directory=directory,
            steps=config.loop.steps,
            make_state=made.state,
            template=made.template(calibrated=False),
            make_parts=partial(_parts, made, data),
            data=data,
            evaluate=made.evaluation(lambda state, _: made.publish(state)),
            eval_every=config.eval.every,
            manifest=made.manifest,
            step=supervised_step,
        ),
        made,
    )


def supervised(learner: Learner) -> Learner:
    """The same learner with the likelihood of the answers as its loss, and no term of RL."""
    return dataclasses.replace(
        learner,
        loss=Bound(negative_log_likelihood, None),
        weights=Bound(none.weights, none.Config()),
        temperature=1.0,
        triage=TriageConfig(),
    )


def _parts(made: _job.Builder, data: Prompts, state: TrainState) -> SupervisedParts:
    rollout, loop, width = made.config.rollout, made.config.loop, made.config.sft.pack_width

    def undo() -> None:
        place = data.get_state()
        data.set_state({**place, "next_batch": place["next_batch"] - 1})

    def draw() -> Examples:
        if width:
            rows = loop.num_prompts * loop.group_size
            return pack_examples(made.tokenizer, lambda: next(data)[0], undo, rows=rows, width=width)
        return encode_examples(
            made.tokenizer,
            next(data),
            prompt_width=rollout.prompt_width,
            completion_width=rollout.max_new_tokens,
        )

    return SupervisedParts(
        learner=made.learner,
        draw=draw,
        prompt_width=rollout.prompt_width,
        base=made.base(state),
        key=jax.random.fold_in(made.key, 1),
    )


def export(job: Job, made: _job.Builder, target: str) -> Path:
    """Writes the last checkpoint's parameters as a Hugging Face folder, in `rollout.dtype`.

    On a mesh every device gets them whole for it; process 0 writes.
    """
    state = job.directory.checkpoints.restore(job.template).state
    dtype, layout = dtype_of(made.config.rollout.dtype), made.sides.trainer.layout

    @jax.jit
    def whole(params: PyTree) -> PyTree:
        return constrain_whole(jax.tree.map(lambda x: x.astype(dtype), params), layout)

    params = whole(join_layers(state.params))
    if jax.process_index() == 0:
        interchange.save_hf(params, target, config=made.model, tokenizer=made.tokenizer)
    return Path(target)
