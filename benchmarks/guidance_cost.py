"""What guidance (TRACE) costs a GRPO step: capture in the rollout, use in the update.

    python benchmarks/guidance_cost.py
    python benchmarks/guidance_cost.py --model qwen3_1_7b --layers 4 --prompts 8 --group 1 \\
        --prompt_width 4032 --tokens 64 --trained 4032 --masters bfloat16 --json OUTPUT.json

The model is random, in bfloat16; `--layers` takes fewer of its layers and as much less of its vocabulary, so
that the head keeps its share. The arms differ in guidance alone: "without" is the same W4A4 and NVFP4 KV
cache, nothing recorded, nothing followed. Calls alternate between the arms; a figure is the least of an
arm's calls: on a GPU the sum of all kernels of the call's profile, on a CPU the process's CPU time, which
other work on the machine disturbs less than the clock. `--trained` takes the loss on the last columns of the
sampled rows, however many of them were prompts. `--phases stream` compares an update whose records lie on the
device with one that fetches them from host memory by microbatch (`--microbatch` below the rows), and
says which of their results are equal. Prints JSON and writes it.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import provenance
import rl_step

from fp4rl_jax import models
from fp4rl_jax.algorithms._common import train_batch
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.models import ModelConfig, guidance
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.rollout import calibrate, publish
from fp4rl_jax.trainer import Outcome, init_state, place, update

ROOT = Path(__file__).parent.parent
MODELS = rl_step.MODELS | {
    "small": ModelConfig(
        vocab_size=512, num_layers=8, d_model=256, d_ff=768, num_heads=4, num_kv_heads=2, head_dim=64
    )
}
PHASES = ("rollout", "update")
ARMS = ("with", "without")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """One call of each arm, by phase; nothing is compiled yet."""

    rollout: dict[str, Callable[[], Any]]
    update: dict[str, Callable[[], Any]]
    stream: dict[str, Callable[[], Any]]


def least(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Least kernel (CPU) seconds and wall seconds of each call; the first, which compiles, is left out."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    walls: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            walls[name].append(time.perf_counter() - start)
            taken[name].append(rl_step.kernel_seconds(call))
    return {"kernel": {n: min(s) for n, s in taken.items()}, "wall": {n: min(s) for n, s in walls.items()}}


def shares(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """What the arm "with" takes more than "without": of each phase that has both, and of their sum."""
    kernel = {phase: one["kernel"] for phase, one in found.items()}
    if all(phase in kernel for phase in PHASES):
        kernel["both"] = {name: sum(kernel[phase][name] for phase in PHASES) for name in ARMS}
    return {phase: arm["with"] / arm["without"] - 1 for phase, arm in kernel.items() if "with" in arm}


def sampler_of(config: ModelConfig, side: Side, params: Any, shape: rl_step.Shape) -> Callable[[], Rollouts]:
    """A function that samples rows of full length."""
    seen = jax.tree.map(jnp.ones_like, calibrate.empty(config, side))  # of no effect on the times
    published = publish(params, config=config, side=side, version=0, calibration=seen)
    call = rl_step.rollout_of(published, config, side, shape, "stacked")
    return lambda: call(shape.tokens)


def update_of(
    config: ModelConfig, side: Side, params: Any, out: Rollouts, shape: rl_step.Shape, masters: str,
    memory: Literal["device", "host"] = "device",
) -> Callable[[], Outcome]:  # fmt: skip
    """A function that makes an update of GRPO on the rollouts, always from the same state."""
    learner = rl_step.learner_of(config, side, shape, masters=masters, remat="layer")
    settings = dataclasses.replace(learner.config, guidance_memory=memory)
    learner = dataclasses.replace(learner, config=settings)
    state = init_state(params, learner.subset, settings)
    batch = train_batch(out, jax.random.normal(jax.random.key(2), out.tokens.shape[:1]), ref_logprobs=None)
    placed, held = place(jax.device_get(batch), settings, None)
    placed = jax.device_put(placed, jax.devices()[0])
    step = jax.jit(update, static_argnames="learner")
    return lambda: step(state, placed, None, held, learner=learner)[1]


def equalities(calls: dict[str, Callable[[], Outcome]]) -> dict[str, dict[str, bool]]:
    """Which results have the bits of the first call on the device: again there, and from host memory.

    Where a GPU adds up gradients with atomics, no second call need have the first one's norm.
    """
    first = jax.device_get(calls["device"]())
    found = {}
    for memory, call in calls.items():
        other = jax.device_get(call())
        found[memory] = {
            name: getattr(first, name).tobytes() == getattr(other, name).tobytes()
            for name in ("loss", "grad_norm", "trainer_logprobs")
        }
    return found


def trained(out: Rollouts, columns: int | None) -> Rollouts:
    """The same rows as if their last columns had been sampled; rows are groups of their own then."""
    if columns is None:
        return out
    width = out.tokens.shape[1] - columns
    mask = jnp.broadcast_to(jnp.arange(out.tokens.shape[1]) >= width, out.tokens.shape)
    return dataclasses.replace(out, loss_mask=mask, prompt_width=width)


def calls_of(config: ModelConfig, asked: argparse.Namespace, shape: rl_step.Shape) -> Calls:
    """Both arms of both phases."""
    trainer, rollout = rl_step.sides("trace", config)
    params = models.init_params(config, jax.random.key(0), dtype=asked.masters)
    arms = {"with": rollout, "without": rollout.without_capture()}
    samplers = {name: sampler_of(config, side, params, shape) for name, side in arms.items()}
    if asked.phases == ["rollout"]:
        return Calls(rollout=samplers, update={}, stream={})
    drawn = {name: trained(call(), asked.trained) for name, call in samplers.items()}
    given = (shape, asked.masters)
    updates = {name: update_of(config, trainer, params, out, *given) for name, out in drawn.items()}
    out = drawn["with"]
    host = (
        update_of(config, trainer, params, out, *given, memory="host")
        if shape.microbatch < shape.rows
        else None
    )
    return Calls(
        rollout=samplers, update=updates, stream={"device": updates["with"], "host": host} if host else {}
    )


def main() -> None:
    """Measures both arms and prints the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--layers", type=int, help="fewer layers, and as much less vocabulary")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt_width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--trained", type=int, help="columns that carry the loss; needs --group 1")
    parser.add_argument("--microbatch", type=int, help="rows of an update at once; all by default")
    parser.add_argument("--masters", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--phases", nargs="+", choices=(*PHASES, "stream"), default=list(PHASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/guidance_cost_cpu.json")
    asked = parser.parse_args()
    if asked.trained is not None and asked.group != 1:
        parser.error(f"--trained {asked.trained} with --group {asked.group}: expected --group 1")
    config = rl_step.shallow(MODELS[asked.model], asked.layers)
    shape = rl_step.shape_of(asked)
    if "stream" in asked.phases and shape.microbatch >= shape.rows:
        parser.error(f"--microbatch {asked.microbatch}: stream needs it below the {shape.rows} rows")
    calls = calls_of(config, asked, shape)
    found = {phase: least(getattr(calls, phase), asked.repeats) for phase in asked.phases}
    _, rollout = rl_step.sides("trace", config)
    record: dict[str, Any] = {
        **provenance.facts(),
        "model": dataclasses.asdict(config),
        "shape": dataclasses.asdict(shape) | {"trained": asked.trained or asked.tokens},
        "masters": asked.masters,
        "bytes a token": guidance.record_bytes(config, rollout.specs, rollout.kv),
        "seconds": found,
        "equal": equalities(calls.stream) if "stream" in asked.phases else None,
        "share": shares(found),
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: record[key] for key in ("seconds", "equal", "share")}, indent=1))


if __name__ == "__main__":
    main()
