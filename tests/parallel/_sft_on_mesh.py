"""`fp4rl sft` on fsdp=2 beside one device, as JSON: `_sft_on_mesh.py padded|packed FOLDER`.

Run in a process of its own, which sets the simulated devices before jax starts. Writes FOLDER/found.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import interchange, models
from fp4rl_jax.cli import _sft_job
from fp4rl_jax.cli.sft import train
from fp4rl_jax.config import Config, load
from fp4rl_jax.loop.supervised import batch_of
from fp4rl_jax.runs import RunDirectory, catalogue
from fp4rl_jax.runs.files import read_lines
from fp4rl_jax.trainer.update import _score

CI = str(Path(__file__).parents[2] / "configs/ci/grpo.toml")
UNIT = 2.0**-24  # half a unit in the last place of float32
LR = 1e-5
SHARED = (
    "run.tensorboard=off", "run.progress=off", "run.resume=auto", "run.checkpoint_every=1", "eval.problems=0",
    "recipe.name=bf16", "trainer.dtype=float32", "trainer.frozen_dtype=float32", "rollout.dtype=float32",
    f"trainer.optim.lr={LR}", "loop.num_prompts=2", "loop.group_size=2", "task.high=12",
    "model.shape.num_heads=2", "model.shape.d_ff=64",
)  # fmt: skip


def config(folder: Path, *words: str) -> Config:
    return load([CI], [*SHARED, f"run.root={folder}", *words])


def ran(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Trains, writes FOLDER/model...; its metrics without the clock's."""
    made = config(folder, *words)
    assert train(made, output=str(folder / f"model{made.loop.steps}")) == 0
    return [catalogue.without_clock(line) for line in read_lines(folder / "ci-grpo" / "metrics.jsonl")]


def bound(folder: Path, *words: str) -> float:
    """How far two orders of the same sums may move a token's log-prob: see `_on_meshes.bounds`."""
    made = config(folder, *words)
    with RunDirectory.open(made.run, resolved={}) as directory:
        job, built = _sft_job.job(made, directory, target=str(folder / "none"))
        state = job.make_state()
        batch = batch_of(job.make_parts(state).draw(), prompt_width=made.rollout.prompt_width)

    def logprobs(tree: Any) -> jax.Array:
        return _score(tree, batch, built.learner).logprobs.reshape(-1)

    @jax.jit
    def condition(tree: Any) -> jax.Array:
        _, pull = jax.vjp(logprobs, tree)

        def one(place: jax.Array) -> jax.Array:
            (slopes,) = pull(jnp.zeros(batch.tokens.size).at[place].set(1.0))
            parts = jax.tree.map(lambda s, w: jnp.sum(jnp.abs(s * w)), slopes, tree)
            return sum(jax.tree.leaves(parts))

        return jnp.max(jax.lax.map(one, jnp.asarray(np.flatnonzero(batch.loss_mask))))

    model = built.model
    widest = max(model.d_model, model.num_heads * model.head_dim, model.d_ff)
    gamma = (widest + model.d_model + model.head_dim + 2 * batch.tokens.shape[1]) * UNIT
    return 2 * (gamma * float(condition(models.fuse(state.params))) + model.vocab_size * UNIT)


def main(kind: str, folder: Path) -> None:
    packing = ("sft.pack_width=160",) if kind == "packed" else ()
    one = ran(folder / "one", "loop.steps=2", *packing)
    mesh = ("mesh.fsdp=2", *packing)
    whole = ran(folder / "mesh", "loop.steps=2", *mesh)
    ran(folder / "cut", "loop.steps=1", *mesh)
    cut = ran(folder / "cut", "loop.steps=2", *mesh)
    first, second = (interchange.load(str(folder / n / "model2"), dtype="float32") for n in ("one", "mesh"))
    apart = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), first.params, second.params)
    found = {
        "losses": [[line["loss"] for line in run] for run in (one, whole)],
        "examples": [[line["trained_examples"] for line in run] for run in (one, whole)],
        "grad_norm": one[1]["grad_norm"],
        "parameters": sum(x.size for x in jax.tree.leaves(first.params)),
        "models": max(jax.tree.leaves(apart)),
        "resumed": cut == whole,
        "logprob_bound": bound(folder / "bound", "loop.steps=2", *packing),
    }
    (folder / "found.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
