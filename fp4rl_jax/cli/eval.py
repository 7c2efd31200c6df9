"""`fp4rl eval`: scores a model on a task, greedy or sampled, with confidence intervals."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from fp4rl_jax import tasks
from fp4rl_jax.cli import _failures, _flags, _policy
from fp4rl_jax.cli._policy import Policy
from fp4rl_jax.config import Config
from fp4rl_jax.configuring import merge, parse_override, to_plain
from fp4rl_jax.configuring.build import build_plugin
from fp4rl_jax.rollout import Evaluation, Evaluator, evaluate
from fp4rl_jax.tasks import Task
from fp4rl_jax.text import encode_prompts

SUMMARY = "score a model on a task: greedy, mean@k and pass@k with confidence intervals"


def main(argv: Sequence[str]) -> int:
    """Evaluates; exit codes as docs/RUNS.md lists them."""
    values = flags.FlagValues()
    _policy.define_flags(values)
    flags.DEFINE_string(
        "task", "arithmetic", "the task to score on; with --run, the run's by default", flag_values=values
    )
    flags.DEFINE_multi_string("set", [], "key=value of the task; repeatable", flag_values=values)
    flags.DEFINE_integer(
        "num_samples", 1, "answers an item; more than 1 needs a temperature", flag_values=values
    )
    flags.DEFINE_list("pass_at", [], "k's of pass@k, each at most num_samples", flag_values=values)
    flags.DEFINE_integer("limit", 128, "how many held-out items", flag_values=values)
    flags.DEFINE_integer("batch_prompts", 16, "items a batch", flag_values=values)
    flags.DEFINE_integer("prompt_width", 64, "columns of the prompt", flag_values=values)
    flags.DEFINE_string("out", None, "write every item's answers here, as JSON lines", flag_values=values)
    _flags.parse(values, argv, name="eval", summary=SUMMARY)
    with _failures.settings():
        run = _policy.run_config(values, name="eval")
        task = build_task(_task_settings(values, run), values["set"].value or ())
        out = _flags.output_file(values, "out")
        policy = _policy.load(values, run)
        print(_policy.describe(policy), file=sys.stderr)
        found = _evaluate(policy, task, values, run)
    print(summary(found, tuple(int(k) for k in values["pass_at"].value or ())))
    if out is not None:
        _write(found, out)
    return 0


def _task_settings(values: flags.FlagValues, run: Config | None) -> dict[str, Any]:
    """The run's task with its settings, or the task that the flag names with the defaults."""
    if run is not None and not values["task"].present:
        return to_plain(run.task)
    return {"name": _flags.get(values, "task", str)}


def build_task(settings: dict[str, Any], overrides: Sequence[str]) -> Task:
    """The task of `settings` with `key=value` over them; ConfigError or ValueError with the nearest name."""
    for override in overrides:
        settings = dict(merge(settings, parse_override(override)))
    plugin = build_plugin(tasks.__name__, settings, path="task")
    return plugin.module.build(plugin.config)


def _evaluate(policy: Policy, task: Task, values: flags.FlagValues, run: Config | None) -> Evaluation:
    tokenizer, width = policy.tokenizer, _flags.get(values, "prompt_width", int)
    if run is not None and not values["prompt_width"].present:
        width = run.rollout.prompt_width
    limit = min(_flags.get(values, "limit", int), len(task.eval))
    evaluator = Evaluator(
        encode=lambda items: encode_prompts(
            tokenizer, [item.messages for item in items], width=width, names=[item.key for item in items]
        ),
        decode=tokenizer.decode,
        reward=task.reward,
        config=policy.config,
        side=policy.side,
        sampling=_policy.sampling(values, tokenizer, run),
        batch_prompts=_flags.get(values, "batch_prompts", int),
        num_samples=_flags.get(values, "num_samples", int),
    )
    items = [task.eval[index] for index in range(limit)]
    key = jax.random.key(_flags.get(values, "seed", int))
    return evaluate(policy.published, items, key, evaluator=evaluator)


def summary(found: Evaluation, ks: tuple[int, ...]) -> str:
    """What is printed: one estimate a line, with its 95 % interval and how it was made."""
    items, samples = found.correct.shape
    mean = found.mean_at_k()
    lines = [f"{items} held-out items, {samples} answers each"]
    lines.append(f"{'pass@1' if samples == 1 else f'mean@{samples}'}: {mean}  ({mean.method}, 95 %)")
    lines += [f"pass@{k}: {value}  ({value.method}, 95 %)" for k, value in found.pass_at(ks).items() if k > 1]
    lines.append(f"reward: {found.mean_reward()}  ({found.mean_reward().method}, 95 %)")
    lines.append(f"ended by a stop token: {found.finished.mean():.3f} of the answers")
    lines.append(f"mean length: {found.lengths.mean():.1f} tokens")
    return "\n".join(lines)


def _write(found: Evaluation, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number, item in enumerate(found.items):
            row = {
                "key": item.key,
                "prompt": item.prompt,
                "answers": list(found.completions[number]),
                "correct": found.correct[number].tolist(),
                "rewards": np.asarray(found.rewards[number], float).tolist(),
            }
            file.write(json.dumps(row) + "\n")
