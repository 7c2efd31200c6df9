"""`fp4rl train`: runs reinforcement learning as a configuration says, resumable at any instant."""

import sys
from collections.abc import Sequence

from fp4rl_jax.cli import _flags
from fp4rl_jax.config import Config, as_dict

SUMMARY = "train a model with GRPO or a relative, its rollouts in FP4"


def main(argv: Sequence[str]) -> int:
    """Trains; exit codes as docs/RUNS.md lists them."""
    values = _flags.config_flags()
    _flags.parse(values, argv, name="train", summary=SUMMARY)
    return train(_flags.load_config(values, name="train"))


def train(config: Config) -> int:
    """Opens the run's folder and runs the job; an expected failure is one line and its exit code."""
    from fp4rl_jax.cli import _job  # jax and the models load only once the configuration is sound
    from fp4rl_jax.loop import run
    from fp4rl_jax.runs import RunDirectory, RunError, exit_codes

    try:
        with RunDirectory.open(config.run, resolved=as_dict(config)) as directory:
            try:
                job = _job.job(config, directory)
            except (ValueError, FileNotFoundError) as error:
                print(f"fp4rl train: {error}", file=sys.stderr)
                return exit_codes.USAGE
            return run(job)
    except RunError as error:
        print(f"fp4rl train: {error}", file=sys.stderr)
        return error.exit_code
