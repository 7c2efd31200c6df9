"""CPU time of a rollout with a residual term against the plain W4A4 rollout of the same format.

    python benchmarks/residual_cost.py [--model models/smollm2] [--rounds 5] [--arms "hif4 dense" ...]
        [--json PATH]

Whole `sample` calls (weights decoded, prompts prefilled, tokens decoded) of compiled programs; all arms in
one process, one call each in turn, so that a busy machine meets them alike. CPU time of the process, all
threads, medians over rounds.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import provenance

from fp4rl_jax import interchange, models
from fp4rl_jax.interchange import Loaded
from fp4rl_jax.ops import machine
from fp4rl_jax.ops.spec import Side, SideSpec
from fp4rl_jax.recipes import quads, rollout_resq
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.text import encode_prompts

PROMPTS, GROUP, NEW, WIDTH = 8, 4, 16, 48

Format = Literal["nvfp4", "hif4", "mxfp4"]
Scope = Literal["static", "call", "token"]
Selection = Literal["pairs_4_8", "channels", "tiles_32x64", "dense"]


def arms() -> dict[str, tuple[SideSpec, str]]:
    """Rollout sides by name, each with the plain arm it is held against."""
    formats: tuple[Format, ...] = ("nvfp4", "hif4", "mxfp4")
    found = {
        f"{fmt} none": (rollout_resq.trainer(rollout_resq.Config(format=fmt)), f"{fmt} none")
        for fmt in formats
    }
    scopes: tuple[Scope, ...] = ("static", "call", "token")
    for scope in scopes:
        found[f"nvfp4 blocks {scope} 0.5"] = (quads.rollout(quads.Config(scope=scope)), "nvfp4 none")
    for fmt in formats:
        found[f"{fmt} pattern_2_4"] = (rollout_resq.rollout(rollout_resq.Config(format=fmt)), f"{fmt} none")
    others: tuple[Selection, ...] = ("pairs_4_8", "channels", "tiles_32x64", "dense")
    for name in others:
        found[f"hif4 {name}"] = (rollout_resq.rollout(rollout_resq.Config(selection=name)), "hif4 none")
    return found


def caller(loaded: Loaded, spec: SideSpec) -> Any:
    """A function that samples once and waits; compiled by a first call."""
    config = loaded.config
    side = Side(specs=spec.resolve(models.sites(config)), dtype="bfloat16")
    texts = [f"What is {a} + {12 - a}? Answer with the number only." for a in range(PROMPTS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts, mask = map(jnp.asarray, encode_prompts(loaded.tokenizer, chats, width=WIDTH))
    found = calibrate.first(loaded.params, prompts, mask, config=config, side=side)
    published = publish(loaded.params, config=config, side=side, version=0, calibration=found)
    rows = PROMPTS * GROUP
    keys = row_keys(jax.random.key(0), jnp.arange(rows))
    sampling = SamplingConfig(max_new_tokens=NEW)

    def call() -> None:
        out = sample(
            published, prompts, mask, row_limits=np.full(rows, NEW, np.int32), keys=keys, config=config,
            side=side, sampling=sampling, group_size=GROUP,
        )  # fmt: skip
        jax.block_until_ready(out.tokens)

    call()
    return call


def main() -> None:
    """Times every arm and prints CPU seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    loaded = interchange.load(asked.model, dtype="float32")
    wanted = {*asked.arms, *(arms()[name][1] for name in asked.arms)}
    calls = {name: caller(loaded, spec) for name, (spec, _) in arms().items() if name in wanted}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(asked.rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    found = {
        **provenance.facts(), "model": asked.model.name, "dots": machine.current().narrow,
        "shape": f"{PROMPTS} prompts x {GROUP}, {NEW} new tokens, prompts padded to {WIDTH}",
        "cpu_seconds": seconds, "median_cpu_seconds": medians,
        "ratio_to_plain": {name: medians[name] / medians[arms()[name][1]] for name in calls},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
