"""What routing replay costs a GRPO step of a mixture: recording in the rollout, replaying in the update.

    python benchmarks/replay_cost.py
    python benchmarks/replay_cost.py --model qwen3_30b_a3b --layers 4 --prompts 8 --group 8 --tokens 256 \\
        --masters bfloat16 --json OUTPUT.json

The model is random; `--layers` takes fewer of its layers and as much less of its vocabulary. The arms differ
in replay alone: "with" records each token's experts and the update takes them, "without" does neither, under
the same recipe. Calls alternate between the arms; a figure is the least of an arm's calls: on a GPU the sum
of all kernels of the call's profile, on a CPU the process's CPU time. Prints JSON and writes it where asked.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import provenance
import rl_step
from guidance_cost import ARMS, least, sampler_of, shares, update_of

from fp4rl_jax import models
from fp4rl_jax.models import ModelConfig

MODELS = {
    "small": ModelConfig(
        family="mixtral", vocab_size=512, num_layers=8, d_model=256, d_ff=768, num_heads=4, num_kv_heads=2,
        head_dim=64, num_experts=8, num_active=2, d_expert=384,
    ),
    "smollm2_upcycled": dataclasses.replace(
        rl_step.MODELS["smollm2"], family="mixtral", num_experts=8, num_active=2, d_expert=1536
    ),
    "qwen3_30b_a3b": ModelConfig(
        family="qwen3_moe", vocab_size=151936, num_layers=48, d_model=2048, d_ff=6144, num_heads=32,
        num_kv_heads=4, head_dim=128, rope_theta=1e6, rms_eps=1e-6, qk_norm=True, max_length=40960,
        num_experts=128, num_active=8, d_expert=768,
    ),
}  # fmt: skip


def seconds_of(config: ModelConfig, asked: argparse.Namespace, shape: rl_step.Shape) -> dict[str, Any]:
    """Least seconds of both arms of both phases."""
    trainer, rollout = rl_step.sides(asked.recipe, config)
    params = models.init_params(config, jax.random.key(0), dtype=asked.masters)
    samplers, updates = {}, {}
    for name, replay in zip(ARMS, ("on", "off"), strict=True):
        ours, theirs = (dataclasses.replace(side, replay=replay) for side in (trainer, rollout))
        samplers[name] = sampler_of(config, theirs, params, shape)
        updates[name] = update_of(config, ours, params, samplers[name](), shape, asked.masters)
    return {"rollout": least(samplers, asked.repeats), "update": least(updates, asked.repeats)}


def main() -> None:
    """Measures both arms and prints the shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--layers", type=int, help="fewer layers, and as much less vocabulary")
    parser.add_argument("--recipe", default="qat_w4a4")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt_width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--microbatch", type=int, help="rows of an update at once; all by default")
    parser.add_argument("--masters", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    config = rl_step.shallow(MODELS[asked.model], asked.layers)
    shape = rl_step.shape_of(asked)
    found = seconds_of(config, asked, shape)
    record = {
        **provenance.facts(), "model": dataclasses.asdict(config), "shape": dataclasses.asdict(shape),
        "recipe": asked.recipe, "masters": asked.masters, "seconds": found, "share": shares(found),
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
