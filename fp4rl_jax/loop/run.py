"""A run from its first step, or from its checkpoint, to its end: what outlives a process.

A run that was stopped at any instant and resumed writes the same metrics, wall-clock fields
apart, and reaches the same parameters: a checkpoint holds the whole state, and every key follows
from the root key and the step.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from absl import logging

from fp4rl_jax.loop.collect import Collected
from fp4rl_jax.loop.stop import StopRequest, stop_on_signals
from fp4rl_jax.loop.sync import Step, train_step
from fp4rl_jax.rollout.estimators import bootstrap_mean
from fp4rl_jax.rollout.evaluate import Evaluation
from fp4rl_jax.runs import RunDirectory, RunError, exit_codes, give_back, make_progress
from fp4rl_jax.runs.files import read_lines
from fp4rl_jax.runs.progress import Progress
from fp4rl_jax.trainer import TrainState


class NonFiniteRunError(RunError):
    """Too many updates in a row were not finite; the message names the last good checkpoint."""

    exit_code = exit_codes.NON_FINITE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """All that a run needs, built once by the command line.

    Attributes:
        directory: the open run folder.
        steps: of the whole run.
        make_state: makes the first state.
        template: the state's shapes, to restore into.
        make_parts: (a state, whose frozen parameters are the run's) -> the step's parts.
        data: the prompt stream, `get_state` / `set_state`.
        evaluate: (state, the step's parts) -> Evaluation, or None.
        eval_every: steps between evaluations, 0 for the ends only.
        manifest: (start step) -> the manifest.
        step: (state, number, parts) -> (state, Step).
        compile_tasks: (a state) -> functions, each compiling a program of steps or evaluations.
    """

    directory: RunDirectory
    steps: int
    make_state: Callable[[], TrainState]
    template: TrainState
    make_parts: Callable[[TrainState], Any]
    data: Any
    evaluate: Callable[[TrainState, Any], Evaluation] | None
    eval_every: int
    manifest: Callable[[int], Mapping[str, Any]]
    step: Callable[[TrainState, int, Any], tuple[TrainState, Step]] = train_step
    compile_tasks: Callable[[TrainState], Sequence[Callable[[], object]]] = lambda state: ()


def run(job: Job, *, stop: StopRequest | None = None, progress: Progress | None = None) -> int:
    """Runs the job to its end, or until it is asked to stop.

    Args:
        job: what is run.
        stop: what asks, where more than this run is to be stopped; the run's own signal handlers if None.
        progress: where steps are shown, where more than this run is; left open. One of the run's own if None.

    Returns:
        An exit code: 0 at the end, `SAVED_PLEASE_RESTART` when a signal ended it, saved.

    Raises:
        NonFiniteRunError: `trainer.max_skipped` updates in a row were skipped.
        RunError: the folder, a checkpoint or the disk.
    """
    number, state, host = _begin(job)
    if number >= job.steps and _is_finished(job):
        logging.info("%s is finished: %d steps", job.directory.path, number)
        return exit_codes.OK
    with contextlib.ExitStack() as mine:
        shown = progress or mine.enter_context(_own_progress(job, number))
        with contextlib.nullcontext(stop) if stop is not None else stop_on_signals() as asking:
            parts = _make_parts(job, number, state)
            job.directory.start(number)
            job.directory.write_manifest(job.manifest(number))
            if number == 0:
                host = {"before": _evaluate(job, state, parts, 0, "before", shown)}
            asked = asking.agreed()
            while number < job.steps and not asked:
                state, step = job.step(state, number, parts)
                _record(job, number, step, shown)
                number += 1
                asked = asking.agreed()
                _check_skips(job, state, parts)
                if _due(number, job.eval_every) and number < job.steps:
                    _evaluate(job, state, parts, number, "during", shown)
                if _due(number, job.directory.config.checkpoint_every) or asked or number == job.steps:
                    _save(job, number, state, host)
        if number < job.steps:
            shown.message(f"{asked}: saved after step {number}, please restart with run.resume=auto")
            return exit_codes.SAVED_PLEASE_RESTART
        _finish(job, state, parts, host, shown)
        return exit_codes.OK


@contextlib.contextmanager
def _own_progress(job: Job, number: int) -> Iterator[Progress]:
    """The display of a run by itself, closed at its end."""
    mode = job.directory.config.progress if jax.process_index() == 0 else "off"
    shown = make_progress(mode, total=job.steps, start=number)
    try:
        yield shown
    finally:
        shown.close()


def _begin(job: Job) -> tuple[int, TrainState, dict[str, Any]]:
    """The first state, or the latest checkpoint's with the data position put back."""
    if not job.directory.resumed or not job.directory.checkpoints.steps():
        return 0, job.make_state(), {}
    restored = job.directory.checkpoints.restore(job.template)
    host = dict(restored.host)
    job.data.set_state(host.pop("data"))
    return restored.step, restored.state, host


def _is_finished(job: Job) -> bool:
    """Whether the last evaluation was made, too."""
    lines = read_lines(job.directory.path / "evals.jsonl")
    return job.evaluate is None or any(line["step"] == job.steps for line in lines)


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _save(job: Job, number: int, state: TrainState, host: Mapping[str, Any]) -> None:
    job.directory.checkpoints.save(number, state, {**host, "data": job.data.get_state()})


def _record(job: Job, number: int, step: Step, progress: Progress) -> None:
    row = job.directory.metrics.write(number, step.row)
    every = job.directory.config.transcripts_every
    if step.collected is not None and every and number % every == 0:
        count = job.directory.config.transcripts_per_step
        job.directory.write_transcripts(number, _transcripts(step, step.collected, count))
    for line in step.problems:
        progress.message(line)
    progress.advance(number, row)


def _transcripts(step: Step, collected: Collected, count: int) -> list[dict[str, Any]]:
    gap = np.abs(step.trainer_logprobs - np.asarray(collected.rollouts.rollout_logprobs))
    gap = np.where(np.asarray(collected.rollouts.loss_mask), gap, 0.0).max(axis=-1)
    rows = len(collected.completions)
    return [
        {
            "prompt": collected.items[i // collected.rollouts.group_size].prompt,
            "completion": collected.completions[i],
            "reward": float(collected.rewards[i]),
            "reward_parts": {name: float(values[i]) for name, values in collected.parts.items()},
            "logprob_gap_max": float(gap[i]),
        }
        for i in np.unique(np.linspace(0, rows - 1, min(count, rows), dtype=int)).tolist()
    ]


def _check_skips(job: Job, state: TrainState, parts: Any) -> None:
    skipped, limit = int(state.skipped), parts.learner.config.max_skipped
    if skipped < limit:
        return
    saved = job.directory.checkpoints.steps()
    where = job.directory.checkpoints.root / f"{saved[-1]:08d}" if saved else None
    raise NonFiniteRunError(
        f"{skipped} updates in a row had a non-finite loss or gradient (trainer.max_skipped = {limit}); "
        f"the last good checkpoint is {where or 'none: nothing was saved yet'}"
    )


def _make_parts(job: Job, number: int, state: TrainState) -> Any:
    """The parts; what they compile, and what the steps will, is compiled side by side.

    All of it is done before anything runs, whose memory would come on top of a compiler's.
    """

    def compile_one(task: Callable[[], object]) -> None:
        task()
        give_back()

    tasks = job.compile_tasks(state) if number < job.steps else ()
    with ThreadPoolExecutor(2, "compile") as pool:
        compiled = [pool.submit(compile_one, task) for task in tasks]
        parts = job.make_parts(state)
        for task in compiled:
            task.result()
    give_back()
    return parts


def _evaluate(
    job: Job, state: TrainState, parts: Any, number: int, name: str, progress: Progress
) -> list[float] | None:
    """Evaluates and records; returns the score of each problem."""
    if job.evaluate is None:
        return None
    found = job.evaluate(state, parts)
    give_back()
    job.directory.write_eval(number, name, found.record())
    progress.message(
        f"pass@1 {name} step {number}: {found.mean_at_k()} on {len(found.items)} held-out problems"
    )
    return [float(score) for score in found.scores]


def _finish(job: Job, state: TrainState, parts: Any, host: Mapping[str, Any], progress: Progress) -> None:
    """Evaluates the end of the run and the paired difference to its beginning."""
    after = _evaluate(job, state, parts, job.steps, "after", progress)
    before = host.get("before")
    if after is None or before is None:
        return
    change = bootstrap_mean(np.array(after) - np.array(before))
    values = {
        "metric": "pass@1 after - before",
        "value": change.value,
        "low": change.low,
        "high": change.high,
    }
    job.directory.write_eval(job.steps, "difference", {**values, "count": len(after)})
    progress.message(
        f"pass@1 after - before: {change.value:+.3f} [{change.low:+.3f}, {change.high:+.3f}], "
        f"paired over {len(after)} problems, 95 %"
    )
