"""`fp4rl sft`: supervised training on answers, with the trainer, the recipe and the run folder of RL."""

from collections.abc import Sequence

from absl import flags

from fp4rl_jax.cli import _failures, _flags, _processes
from fp4rl_jax.config import Config, as_dict

SUMMARY = "train a model on the answers of a chat file or of a task"


def main(argv: Sequence[str]) -> int:
    """Trains, then writes the model as a Hugging Face folder; exit codes as docs/RUNS.md lists them."""
    values = _flags.config_flags()
    flags.DEFINE_string(
        "output", "", "where the trained model goes; runs/NAME/model by default", flag_values=values
    )
    _processes.define_flags(values)
    _flags.parse(values, argv, name="sft", summary=SUMMARY)
    config = _flags.load_config(values)
    _flags.require_sections(values, ("model",), ("sft", "task"))
    with _processes.joined(_processes.given(values), name="sft"):
        return train(config, output=_flags.get(values, "output", str))


def train(config: Config, *, output: str = "") -> int:
    """Opens the run's folder, trains and exports.

    Raises:
        ConfigError: the configuration does not fit, or the model cannot be written.
        RunError, RewardError, PromptError, PublishError: the folder, the task or the weights.
    """
    import jax

    from fp4rl_jax.cli import _sft_job  # jax and the models load only once the configuration is sound
    from fp4rl_jax.loop import run
    from fp4rl_jax.runs import RunDirectory, exit_codes

    with RunDirectory.open(config.run, resolved=as_dict(config)) as directory:
        target = output or str(directory.path / "model")
        with _failures.settings():
            job, made = _sft_job.job(config, directory, target=target)
        code = run(job)
        if code == exit_codes.OK:
            written = _sft_job.export(job, made, target)
            if jax.process_index() == 0:
                print(f"model: {written}", flush=True)
        return code
