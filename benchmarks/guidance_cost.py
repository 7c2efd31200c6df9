"""What guidance (TRACE) costs a GRPO step on a CPU: capture in the rollout, use in the update.

    python benchmarks/guidance_cost.py [--repeats 7]

A random model (8 layers, width 256, ffn 768, bfloat16), 4 prompts x 8 rows x 64 tokens. The arms differ in
guidance alone: "without" is the same W4A4 and NVFP4 KV cache, nothing recorded, nothing followed. Calls
alternate between the arms; a figure is the least processor time of an arm's calls, which other work on the
machine disturbs less than the clock. Prints JSON; writes benchmarks/results/guidance_cost_cpu.json.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fp4rl_jax import models
from fp4rl_jax.algorithms import grpo
from fp4rl_jax.algorithms._common import train_batch
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.corrections import none as correction
from fp4rl_jax.loop import Bound
from fp4rl_jax.models import ModelConfig, guidance
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.recipes import trace
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.trainer import Learner, init_state, plan, update
from fp4rl_jax.trainer.config import TrainerConfig

ROOT = Path(__file__).parent.parent
CONFIG = ModelConfig(
    vocab_size=512, num_layers=8, d_model=256, d_ff=768, num_heads=4, num_kv_heads=2, head_dim=64
)
PROMPTS, GROUP, WIDTH, NEW = 4, 8, 64, 64


def sides() -> tuple[Side, Side]:
    """The two sides of `trace` with its defaults."""
    settings = trace.Config()
    specs = trace.trainer(settings), trace.rollout(settings)
    found = [Side(specs=spec.resolve(models.sites(CONFIG)), dtype="bfloat16", kv=spec.kv) for spec in specs]
    return found[0], found[1]


def least(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Least processor seconds of each call, the first of each, which compiles, left out; calls alternate."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.process_time()
            jax.block_until_ready(call())
            taken[name].append(time.process_time() - start)
    return {name: min(seconds[1:]) for name, seconds in taken.items()}


def rollouts_of(side: Side, params: Any, prompts: Any, mask: Any) -> Callable[[], Rollouts]:
    """A function that samples rows of full length."""
    seen = calibrate.first(params, prompts, mask, config=CONFIG, side=side)
    published = publish(params, config=CONFIG, side=side, version=0, calibration=seen)
    rows = PROMPTS * GROUP
    return lambda: sample(
        published, prompts, mask, row_limits=jnp.full(rows, NEW, jnp.int32),
        keys=row_keys(jax.random.key(1), jnp.arange(rows)), config=CONFIG, side=side,
        sampling=SamplingConfig(max_new_tokens=NEW), group_size=GROUP,
    )  # fmt: skip


def updates_of(side: Side, params: Any, out: Rollouts) -> Callable[[], Any]:
    """A function that makes an update of GRPO on the rollouts, always from the same state."""
    config = TrainerConfig()
    shapes = models.abstract_params(CONFIG)
    learner = Learner(
        model=CONFIG, side=side, config=config,
        subset=plan(shapes, config.trainable, num_layers=CONFIG.num_layers),
        loss=Bound(grpo.loss, grpo.Config()), weights=Bound(correction.weights, correction.Config()),
    )  # fmt: skip
    state = init_state(params, learner.subset, config)
    batch = train_batch(out, jax.random.normal(jax.random.key(2), out.tokens.shape[:1]), ref_logprobs=None)
    step = jax.jit(update, static_argnames="learner")
    return lambda: step(state, batch, learner=learner)[1].loss


def main() -> None:
    """Measures both arms and prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    trainer, rollout = sides()
    params = models.init_params(CONFIG, jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (PROMPTS, WIDTH), 3, CONFIG.vocab_size)
    mask = jnp.ones(prompts.shape, bool)
    arms = {"with": rollout, "without": rollout.without_capture()}
    samplers = {name: rollouts_of(side, params, prompts, mask) for name, side in arms.items()}
    drawn = {name: call() for name, call in samplers.items()}
    found = {
        "rollout": least(samplers, asked.repeats),
        "update": least({n: updates_of(trainer, params, out) for n, out in drawn.items()}, asked.repeats),
    }
    found["both"] = {name: found["rollout"][name] + found["update"][name] for name in arms}
    record: dict[str, Any] = {
        "model": dataclasses.asdict(CONFIG),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "bytes a token": guidance.record_bytes(CONFIG, rollout.specs, rollout.kv),
        "processor seconds": found,
        "share": {phase: arm["with"] / arm["without"] - 1 for phase, arm in found.items()},
    }
    (ROOT / "benchmarks/results/guidance_cost_cpu.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("processor seconds", "share")}, indent=1))


if __name__ == "__main__":
    main()
