"""Saves checkpoints until it is killed; `checkpoints_kill_test.py` does the killing.

Run as a script it is a server: it imports jax and orbax once, reads one JSON request a line, and
forks a victim for each (jax starts its backend in the fork only), so that many kills cost seconds.
It answers with the victim's process id, and with its wait status once it has ended.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401 (imported once, before the forks)

from fp4rl_jax.runs import Checkpointer, RunConfig, RunDirectory

FILE_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def state_of(step: int) -> dict[str, Any]:
    """A state that is a function of its step alone, in several dtypes, with a key."""
    rng = np.random.default_rng(step)
    return {
        "params": {"w": rng.standard_normal((64, 64), np.float32), "b": rng.integers(0, 256, 512, np.uint8)},
        "mu": jnp.asarray(rng.standard_normal((64, 64)), jnp.bfloat16),
        "key": jax.random.key(step),
        "version": jnp.int32(step),
    }


def save_until_killed(root: str, acknowledged: str) -> None:
    """Saves the steps after the last acknowledged one, noting each once `save` has returned."""
    checkpointer = Checkpointer(Path(root), keep_last=2)
    known = Path(acknowledged).read_text().split()
    for step in itertools.count(int(known[-1]) + 1 if known else 1):
        checkpointer.save(step, state_of(step), {"position": step})
        with open(acknowledged, "a") as file:
            file.write(f"{step}\n")


def die_at_event(root: str, event: int, step: int) -> None:
    """Saves `step` and is killed at its `event`-th file operation; returns if there are fewer."""
    checkpointer = Checkpointer(Path(root), keep_last=2)
    state = state_of(step)
    counter = itertools.count()

    def hook(name: str, _: tuple[Any, ...]) -> None:
        if name in FILE_OPERATIONS and next(counter) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpointer.save(step, state, {"position": step})


def run_to_the_end(root: str, steps: int, ticks: str) -> None:
    """A run as a loop makes it, resumed if it is there; every value is a function of the state alone.

    Adds a dot to the file `ticks` after each line that it wrote.
    """

    def tick() -> None:
        with open(ticks, "a") as file:
            file.write(".")

    config = RunConfig(root=root, name="a", resume="auto", tensorboard="off")
    with RunDirectory.open(config, resolved={"loop": {"steps": steps}}) as run:
        number, total = 0, jnp.zeros(4096)
        if run.resumed and run.checkpoints.steps():
            restored = run.checkpoints.restore({"total": total})
            number, total = restored.step, restored.state["total"]
        run.start(number)
        run.write_manifest({"start_step": number})
        if number == 0:
            run.write_eval(0, "before", {"value": float(total[0])})
        while number < steps:
            total = total * 0.5 + jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (4096,))
            run.metrics.write(number, {"reward_mean": total.mean(), "entropy": total[0]})
            tick()
            run.write_transcripts(number, [{"prompt": str(number), "completion": str(float(total[1]))}])
            number += 1
            tick()
            if number % 3 == 0 or number == steps:
                run.checkpoints.save(number, {"total": total}, {"position": number})
        run.write_eval(steps, "after", {"value": float(total[0])})


def serve() -> None:
    """Answers requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            WORK[request.pop("do")](**request)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


WORK = {"loop": save_until_killed, "event": die_at_event, "run": run_to_the_end}

if __name__ == "__main__":
    serve()
