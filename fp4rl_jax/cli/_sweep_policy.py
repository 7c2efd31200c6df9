"""Evaluates the final policy of one run of a sweep as another arm publishes it: post-hoc quantization."""

from fp4rl_jax.cli import _failures, _job, _sweep_matrix
from fp4rl_jax.cli._sweep_matrix import Cell
from fp4rl_jax.config import as_dict
from fp4rl_jax.rollout import calibrate
from fp4rl_jax.runs import Checkpointer, RunDirectory, RunNotFoundError, exit_codes
from fp4rl_jax.runs.directory import CHECKPOINTS
from fp4rl_jax.runs.progress import Progress


def evaluate(cell: Cell, source: Cell, shown: Progress) -> int:
    """Restores the source's last checkpoint and evaluates it under the cell's recipe, with the cell's key.

    The cell's folder gets the evaluation "after" and no metrics.

    Raises:
        RunNotFoundError: the source is not finished.
        ConfigError: the cell's model is another one, or its rollout needs a calibration.
        CheckpointError, PublishError, PromptError, RewardError: of the checkpoint, the weights or the task.
    """
    at = _sweep_matrix.progress(source)
    if at.state != "done":
        raise RunNotFoundError(
            f"{source.config.run.path} is not finished ({at.state}): its policy is not there"
        )
    with RunDirectory.open(cell.config.run, resolved=as_dict(cell.config)) as directory:
        with _failures.settings():
            made, theirs = _job.builder(cell.config), _job.builder(source.config)
            if made.model != theirs.model:
                raise ValueError(f"{cell.name} evaluates the policy of {source.name}, which is another model")
            if calibrate.is_needed(made.sides.rollout):
                name = cell.config.recipe.rollout.name
                raise ValueError(
                    f"the rollout of {name!r} calibrates while it trains: expected one that does not"
                )
            assess = made.evaluation(lambda state, _: made.publish(state))
        assert assess is not None  # the matrix has refused eval.problems = 0
        directory.write_manifest(made.manifest(0))
        restored = Checkpointer(source.config.run.path / CHECKPOINTS).restore(theirs.template())
        found = assess(restored.state, None)
        directory.write_eval(cell.config.loop.steps, "after", found.record())
    shown.message(f"pass@1 of {source.name} as {cell.name} publishes it: {found.mean_at_k()}")
    return exit_codes.OK
