"""How fast the sampler decodes SmolLM2, against what the machine allows, and what W4A4 emulation adds.

    python benchmarks/rollout.py [--model models/smollm2] [--rows 64] [--tokens 12] [--rounds 9]
        [--json PATH]

The decode rate is compared with max(bytes / measured bandwidth, FLOP / measured matmul rate) of a
step: the bytes of every weight once, 2 FLOP a weight and row. Both rates are measured here, in the
dtype that the sampler's dots use on this machine. As in the demo the last 6 layers are trained, and the
others published once. Run it on a quiet machine.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import provenance

from fp4rl_jax import interchange, models, plugins, recipes
from fp4rl_jax.models import ModelConfig, num_parameters
from fp4rl_jax.ops import machine
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish, publish_frozen, row_keys, sample
from fp4rl_jax.text import encode_prompts

REPEATS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed."""

    config: ModelConfig
    prompts: Any
    prompt_mask: Any
    rows: int
    group: int
    trained: int


def seconds(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median of `repeats` timed calls after one that compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bandwidth() -> float:
    """Bytes per second of reading 256 MiB of float32 once."""
    x = jnp.ones((1 << 26,), jnp.float32)
    read = jax.jit(jnp.sum)
    return x.nbytes / seconds(lambda: read(x))


def matmul_rate(rows: int, config: ModelConfig, dtype: Any) -> float:
    """FLOP per second over the model's own shapes [rows, K] x [N, K], weighted as the model has them."""
    d, c = config.d_model, config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * c
    layer = [(qkv, d), (d, config.num_heads * c), (2 * config.d_ff, d), (d, config.d_ff)]
    shapes = [(n, k, config.num_layers) for n, k in layer] + [(config.vocab_size, d, 1)]
    dot = jax.jit(
        lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    )
    total = work = 0.0
    for n, k, count in shapes:
        x, w = jnp.ones((rows, k), dtype), jnp.ones((n, k), dtype)
        total += count * seconds(lambda x=x, w=w: dot(x, w))
        work += count * 2.0 * rows * n * k
    return work / total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calls:
    """What is timed of a recipe: publishing, and sampling all tokens or one; all compiled."""

    publish: Callable[[], Any]
    whole: Callable[[], Any]
    first: Callable[[], Any]


def calls(params: Any, case: Case, recipe: str, tokens: int) -> Calls:
    """A recipe's calls, each made once."""
    module = plugins.load(recipes, recipe)
    spec = module.rollout(module.Config())
    side = Side(specs=spec.resolve(models.sites(case.config)), dtype="bfloat16", kv=spec.kv)
    seen = jax.tree.map(jnp.ones_like, calibrate.empty(case.config, side))  # of no effect on the times

    masters = models.split_layers(params, case.config.num_layers - case.trained)
    parts = {"embed": masters["embed"], "layers": masters["layers"][:1]}
    frozen = publish_frozen(parts, config=case.config, side=side)

    def made() -> Any:
        return publish(masters, config=case.config, side=side, version=0, calibration=seen, frozen=frozen)

    published = made()

    def call(length: int) -> Callable[[], Any]:
        keys = row_keys(jax.random.key(0), jnp.arange(case.rows))
        limits = jnp.full(case.rows, length, jnp.int32)
        return lambda: sample(
            published, case.prompts, case.prompt_mask, row_limits=limits, keys=keys, config=case.config,
            side=side, sampling=SamplingConfig(max_new_tokens=tokens), group_size=case.group,
        )  # fmt: skip

    found = Calls(publish=lambda: made().params, whole=call(tokens), first=call(1))
    for run in (found.publish, found.whole, found.first):
        jax.block_until_ready(run())
    return found


def in_turns(arms: dict[str, Calls], rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Median seconds of every call, one of each arm in turn, so that a busy machine meets all alike;
    and of a decode step, from a whole call less one that samples one token."""
    taken: dict[str, dict[str, list[float]]] = {
        arm: {"publish": [], "whole": [], "first": []} for arm in arms
    }
    for name in ("whole", "first", "publish"):  # publishing apart: it leaves the allocator another heap
        for _ in range(rounds):
            for arm, found in arms.items():
                start = time.perf_counter()
                jax.block_until_ready(getattr(found, name)())
                taken[arm][name].append(time.perf_counter() - start)
    medians = {
        arm: {name: statistics.median(times) for name, times in of.items()} for arm, of in taken.items()
    }
    for of in medians.values():
        of["decode_step"] = (of["whole"] - of["first"]) / (tokens - 1)
    return medians


def main() -> None:
    """Times, compares, prints, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument(
        "--trained", type=int, default=6, help="layers whose weights change; 0 < trained < all"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    loaded = interchange.load(options.model, dtype="bfloat16")
    load_seconds = time.perf_counter() - start
    questions = [
        f"What is {a} + {a + 3}? Answer with the number only." for a in range(options.rows // options.group)
    ]
    chats = [[{"role": "user", "content": text}] for text in questions]
    prompts, mask = encode_prompts(loaded.tokenizer, chats, width=48)
    case = Case(
        config=loaded.config, prompts=prompts, prompt_mask=mask, rows=options.rows, group=options.group,
        trained=options.trained,
    )  # fmt: skip
    narrow = jnp.dtype(machine.current().narrow)
    weights = num_parameters(loaded.config)
    rates = {"bandwidth": bandwidth(), "matmul_rate": matmul_rate(options.rows, loaded.config, narrow)}
    if narrow != jnp.bfloat16:
        rates["matmul_rate_bfloat16"] = matmul_rate(options.rows, loaded.config, jnp.bfloat16)
    bytes_seconds = weights * narrow.itemsize / rates["bandwidth"]
    flop_seconds = 2.0 * weights * options.rows / rates["matmul_rate"]
    found: dict[str, Any] = {
        **provenance.facts(), "dot_dtype": narrow.name, "load_seconds": load_seconds,
        **rates, "bound_step_seconds": max(bytes_seconds, flop_seconds),
        "bytes_seconds": bytes_seconds, "flop_seconds": flop_seconds,
    }  # fmt: skip
    print(json.dumps(found), file=sys.stderr, flush=True)
    arms = {recipe: calls(loaded.params, case, recipe, options.tokens) for recipe in ("bf16", "naive_nvfp4")}
    for recipe, times in in_turns(arms, options.rounds, options.tokens).items():
        found[recipe] = {**times, "share_of_bound": found["bound_step_seconds"] / times["decode_step"]}
    found["w4a4_overhead"] = found["naive_nvfp4"]["whole"] / found["bf16"]["whole"] - 1
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
