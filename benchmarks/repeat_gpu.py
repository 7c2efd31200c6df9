"""Which part of a step repeats bit for bit, within one process and between two.

    python benchmarks/repeat_gpu.py --json OUTPUT.json

Each process makes a random model (`resume_gpu.py`'s), publishes it, samples and updates, every part
several times from the same operands, and keeps a digest of each result. Two processes run one after the
other in each environment of `resume_gpu.py`, without a compilation cache. The first part whose digests
differ is where a run and its resumption part. A sampler's digests go by column of tokens, an update's
by parameter.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import provenance
import resume_gpu

from fp4rl_jax.config import load
from fp4rl_jax.data import Prompts
from fp4rl_jax.loop.sync import make_update


def digest(tree: Any) -> str:
    """Of all leaves' bytes, in the tree's order."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(tree)):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()[:16]


def columns(rollouts: Any) -> list[str]:
    """A digest of the sampled tokens and log-probs of every column."""
    tokens, logprobs = (np.asarray(x) for x in (rollouts.tokens, rollouts.rollout_logprobs))
    generated = tokens[:, -logprobs.shape[1] :]
    return [digest((generated[:, i], logprobs[:, i])) for i in range(logprobs.shape[1])]


def stages(words: list[str], repeats: int) -> dict[str, list[Any]]:
    """{part: its digests, one a repeat} of this process."""
    from fp4rl_jax.cli import _job

    made = _job.builder(load([resume_gpu.BASE], words))
    data = Prompts(made.task.train, made.config.loop.num_prompts, seed=made.config.run.seed)
    items = next(data)
    prompts, mask = made.encode(items)
    rewards = np.arange(len(prompts) * made.config.loop.group_size, dtype=np.float32) % 2
    found: dict[str, list[Any]] = {}

    def note(name: str, value: Any) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(repeats):
        state = made.state()
        note("params", digest(state.params))
        published = made.publish(state)
        note("published", digest(published))
        rollouts = made.sample(published, prompts, mask, jax.random.key(1))
        note("rollouts", columns(rollouts))
        batch = made.prepare(jax.device_get(rollouts), jnp.asarray(rewards), None)
        after, outcome = make_update(state, batch, made.base(state), learner=made.learner, key=None)
        note("scores", digest(outcome.trainer_logprobs))
        note("loss", digest(outcome.loss))
        note("gradient norm", digest(outcome.grad_norm))
        leaves = jax.tree_util.tree_leaves_with_path(after.params)
        note("updated", {jax.tree_util.keystr(path): digest(leaf) for path, leaf in leaves})
    return found


def compared(first: list[Any], second: list[Any]) -> str:
    """`equal`, or what differs."""
    for ours, theirs in zip(first, second, strict=True):
        if ours == theirs:
            continue
        if isinstance(ours, list):
            return (
                f"differs from column {[a == b for a, b in zip(ours, theirs, strict=True)].index(False)} on"
            )
        if isinstance(ours, dict):
            return "differs: " + " ".join(path for path, value in ours.items() if value != theirs[path])
        return "differs"
    return "equal"


def verdicts(processes: list[dict[str, list[Any]]]) -> dict[str, dict[str, str]]:
    """Every part, repeated in the first process and in two of them."""
    one, two = processes
    return {
        name: {
            "within a process": compared(values[:1] * (len(values) - 1), values[1:]),
            "between processes": compared(values[:1], two[name][:1]),
        }
        for name, values in one.items()
    }


def main() -> None:
    """Runs the processes of every environment, compares, prints, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(resume_gpu.SHAPES), default="smollm2")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, section.key=value")
    parser.add_argument("--repeats", type=int, default=3, help="of every part in one process")
    names = sorted(resume_gpu.ENVIRONMENTS)
    parser.add_argument("--environments", nargs="+", choices=names, default=names)
    parser.add_argument("--child", type=Path, help="(internal) run here and write the digests to this file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words = [*resume_gpu.SHAPES[options.model], "run.tensorboard=off", "eval.problems=0", *options.set]
    if options.child:
        options.child.write_text(json.dumps(stages(words, options.repeats)))
        return
    record = {**provenance.facts(), "settings": words}
    began = time.perf_counter()
    for environment in options.environments:
        with tempfile.TemporaryDirectory() as temporary:
            results = [Path(temporary) / str(index) for index in range(2)]
            for path in results:
                command = [sys.executable, __file__, "--model", options.model, "--child", str(path)]
                command += ["--repeats", str(options.repeats), "--set", *options.set]
                line, bare = resume_gpu.shell_of(environment, command)
                subprocess.run(["sh", "-c", line], cwd=resume_gpu.ROOT, env=bare, check=True)
            record[environment] = verdicts([json.loads(path.read_text()) for path in results])
        print(json.dumps({environment: record[environment]}, indent=1), flush=True)
    record["seconds"] = round(time.perf_counter() - began, 1)
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
