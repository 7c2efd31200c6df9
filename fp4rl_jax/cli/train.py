"""`fp4rl train`: runs reinforcement learning as a configuration says, resumable at any instant."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp4rl_jax.cli import _failures, _flags, _processes
from fp4rl_jax.config import Config, as_dict

if TYPE_CHECKING:
    from fp4rl_jax.loop.stop import StopRequest
    from fp4rl_jax.runs.progress import Progress

SUMMARY = "train a model with GRPO or a relative, its rollouts in FP4"


def main(argv: Sequence[str]) -> int:
    """Trains; exit codes as docs/RUNS.md lists them."""
    values = _flags.config_flags()
    _processes.define_flags(values)
    _flags.parse(values, argv, name="train", summary=SUMMARY)
    config = _flags.load_config(values)
    _flags.require_sections(values, ("model",), ("task",))
    with _processes.joined(_processes.given(values), name="train"):
        return train(config)


def train(config: Config, *, stop: "StopRequest | None" = None, progress: "Progress | None" = None) -> int:
    """Opens the run's folder and runs the job; `stop` and `progress` as `loop.run`.

    Raises:
        ConfigError: the model, a recipe or the task does not fit the configuration.
        RunError, RewardError, PromptError, PublishError: the folder, the task or the weights.
    """
    from fp4rl_jax.cli import _job  # jax and the models load only once the configuration is sound
    from fp4rl_jax.loop import run
    from fp4rl_jax.runs import RunDirectory

    with RunDirectory.open(config.run, resolved=as_dict(config)) as directory:
        with _failures.settings():
            job = _job.job(config, directory)
        return run(job, stop=stop, progress=progress)
