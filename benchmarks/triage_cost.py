"""What TRIAGE takes of an update: the same update with it off and on, and its own operations alone.

    python benchmarks/triage_cost.py --model smollm2 --prompts 16 --group 16 --json OUTPUT.json

Arms: off; Gate and Repair as published; the same with the Gate's mean taken per response; and, of several
microbatches, the published form that scores the batch twice instead of keeping its layers' inputs. Each in
one microbatch of all rows and in several.

Seconds are the sum of all kernels of a call's profile on a GPU; on a CPU they are the process's CPU
seconds. Arms take turns, an arm's figure is the median of its `--repeats` calls. `alone` compiles Gate,
Repair and its gradient as one program over the batch's log-probs: an upper bound of what they add inside an
update, where they share loops with the loss. FLOP and bytes are the compiler's own count, which counts a
loop's body once; `temp_bytes` is what a call needs beside its arguments.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import provenance
import rl_step

from fp4rl_jax import models
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.objectives import triage
from fp4rl_jax.objectives.triage import GateConfig, RepairConfig, TriageConfig
from fp4rl_jax.trainer import Learner, TrainState, init_state, update

PUBLISHED = TriageConfig(gate=GateConfig(scope="q3"), repair=RepairConfig(scope="adv_positive"))
PER_RESPONSE = dataclasses.replace(PUBLISHED, gate=GateConfig(scope="q3", reduction="response"))
TWICE = dataclasses.replace(PUBLISHED, gate=GateConfig(scope="q3", microbatches="score_twice"))
ONE = {"off": TriageConfig(), "published": PUBLISHED, "per_response": PER_RESPONSE}
TRIAGES = {"one": ONE, "several": ONE | {"score_twice": TWICE}}


def batch_of(learner: Learner, shape: rl_step.Shape) -> TrainBatch:
    """Random tokens whose gap is large enough that every branch of the Gate is taken."""
    drawn = rl_step.drawn_rollouts(learner.model, shape)
    gap = jnp.log(learner.model.vocab_size) + 2 * jax.random.normal(jax.random.key(4), drawn.tokens.shape)
    return TrainBatch(
        tokens=drawn.tokens, token_mask=drawn.token_mask, loss_mask=drawn.loss_mask,
        rollout_logprobs=jnp.where(drawn.loss_mask, -gap, 0.0),
        advantages=jax.random.normal(jax.random.key(2), drawn.tokens.shape[:1]),
        prompt_width=drawn.prompt_width, group_size=drawn.group_size,
    )  # fmt: skip


def compiled(
    learner: Learner, state: TrainState, batch: TrainBatch
) -> tuple[Callable[[], Any], dict[str, float]]:
    """An update of that learner, which leaves the state as it is, and the compiler's count."""
    program = jax.jit(partial(update, learner=learner)).lower(state, batch).compile()
    return lambda: program(state, batch), counted(program)


def counted(program: Any) -> dict[str, float]:
    """FLOP, bytes accessed and bytes of temporaries of a compiled program."""
    found = program.cost_analysis() or {}
    memory = program.memory_analysis()
    return {
        "flop": found.get("flops", 0.0),
        "bytes": found.get("bytes accessed", 0.0),
        "temp_bytes": float(memory.temp_size_in_bytes),
    }


def alone(batch: TrainBatch) -> tuple[Callable[[], Any], dict[str, float]]:
    """Gate, Repair and the gradient of both as one program."""
    rows = (batch.rollout_logprobs, batch.advantages, batch.loss_mask)

    def loss(logprobs: jax.Array, rollout: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
        delta = triage.delta_of(logprobs, rollout, mask)
        start = batch.prompt_width
        weights = triage.gate_weights(delta, advantages, mask, PUBLISHED.gate, start=start)
        found = triage.repair(delta, advantages, mask, PUBLISHED.repair, start=start)["repair"]
        return jnp.sum(weights * logprobs) / jnp.sum(weights) + found.total / found.count

    start = jnp.full(batch.tokens.shape, -jnp.log(49152.0))
    program = jax.jit(jax.value_and_grad(loss)).lower(start, *rows).compile()
    return lambda: program(start, *rows), counted(program)


def measure(options: argparse.Namespace, shape: rl_step.Shape) -> dict[str, Any]:
    """All arms in turn."""
    config = rl_step.shallow(rl_step.MODELS[options.model], options.layers)
    trainer, _ = rl_step.sides(options.recipe, config)
    arms: dict[str, tuple[Callable[[], Any], dict[str, float]]] = {}
    learner = rl_step.learner_of(config, trainer, shape, masters=options.masters, remat=options.remat)
    masters = models.init_params(config, jax.random.key(0), dtype=options.masters)
    state, batch = init_state(masters, learner.subset, learner.config), batch_of(learner, shape)
    rows_of = {"one": shape.rows, "several": options.microbatch}
    for parts, rows in ((parts, rows_of[parts]) for parts in options.parts):
        settings = dataclasses.replace(learner.config, microbatch_rows=rows)
        for name, chosen in TRIAGES[parts].items():
            arms[f"{parts}/{name}"] = compiled(
                dataclasses.replace(learner, config=settings, triage=chosen), state, batch
            )
            print(f"compiled {parts}/{name}", file=sys.stderr, flush=True)
    arms["alone"] = alone(batch)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(options.repeats + 1):
        for name, (run, _) in arms.items():
            seconds = rl_step.kernel_seconds(run)
            if turn:
                taken[name].append(seconds)
    return {name: {"seconds": taken[name], **counts} for name, (_, counts) in arms.items()}


def shares(found: dict[str, Any]) -> dict[str, float]:
    """What each arm adds to the update without TRIAGE, and what `alone` takes, as shares of that update."""
    middle = {name: statistics.median(one["seconds"]) for name, one in found.items()}
    result = {}
    for parts in ("one", "several"):
        if f"{parts}/off" not in middle:
            continue
        off = middle[f"{parts}/off"]
        for name in TRIAGES[parts].keys() - {"off"}:
            result[f"{parts}/{name}"] = middle[f"{parts}/{name}"] / off - 1
        result[f"{parts}/alone"] = middle["alone"] / off
    return result


def main() -> None:
    """Measures, prints, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(rl_step.MODELS), default="smollm2")
    parser.add_argument("--layers", type=int, help="fewer layers, and as much less vocabulary")
    parser.add_argument("--parts", nargs="+", choices=("one", "several"), default=["one", "several"])
    parser.add_argument("--recipe", default="naive_nvfp4")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt_width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--masters", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--remat", choices=("layer", "none"), default="layer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = rl_step.shape_of(options)
    found = measure(options, shape)
    record = {
        **provenance.facts(),
        "settings": {name: str(value) for name, value in vars(options).items() if name != "json"},
        "shares": shares(found),
        "arms": found,
    }
    print(json.dumps(record, indent=1))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
