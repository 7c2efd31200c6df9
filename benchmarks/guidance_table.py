"""Code flips and log-prob gap of a W4A4 trainer against a rollout, without and with guidance (TRACE).

    python benchmarks/guidance_table.py [--model models/smollm2]

The rollout runs in bfloat16 with its KV cache in NVFP4 and records the MLP's input, keys and values in
full at every layer. The trainer scores the same tokens, the engines differing as each `engine_gap` says:
"none" in bfloat16, all rows at a time; "dtype" in float32; "rows" in bfloat16, one group of rows at a
time. Every arm is given what its form (of keys and values always the full one) and depth would have recorded.
Prints a table a gap; writes benchmarks/results/guidance_MODEL.json.
"""

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import interchange, models
from fp4rl_jax.interchange import Loaded
from fp4rl_jax.loop.engine_gap import DTYPES
from fp4rl_jax.models import ModelConfig, guidance, kv
from fp4rl_jax.ops.spec import Capture, Side
from fp4rl_jax.quantizers import compact
from fp4rl_jax.recipes import trace
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.text import encode_prompts

ROOT = Path(__file__).parent.parent
SITE = "mlp/gate_up"
GROUP, WIDTH, NEW = 2, 48, 12
ARMS = [("none", 0.0), *((form, depth) for form in ("full", "compact") for depth in (1.0, 0.5, 0.25))]


def sides(config: ModelConfig) -> tuple[Side, Side]:
    """A trainer that is guided where it has a hint, and a rollout that records all, both in bfloat16."""
    settings = trace.Config(form="full", depth=1.0)
    sites = models.sites(config)
    trainer, rollout = (
        Side(specs=spec.resolve(sites), dtype=DTYPES["rollout"], kv=spec.kv)
        for spec in (trace.trainer(settings), trace.rollout(settings))
    )
    return trainer, rollout


def sampled(loaded: Loaded, side: Side) -> Any:
    """Rollouts of six sums, two answers each."""
    texts = [f"What is {a} + {17 - a}? Explain in one sentence." for a in range(6)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    tokens, mask = encode_prompts(loaded.tokenizer, chats, width=WIDTH)
    rows = len(texts) * GROUP
    given = jnp.asarray(tokens), jnp.asarray(mask)
    seen = calibrate.first(loaded.params, *given, config=loaded.config, side=side)
    published = publish(loaded.params, config=loaded.config, side=side, version=0, calibration=seen)
    sampling = SamplingConfig(
        max_new_tokens=NEW, stop_tokens=loaded.tokenizer.stop_ids, pad_token=loaded.tokenizer.pad_id
    )
    return sample(
        published, *given, row_limits=jnp.full(rows, NEW, jnp.int32),
        keys=row_keys(jax.random.key(0), jnp.arange(rows)), config=loaded.config, side=side,
        sampling=sampling, group_size=GROUP,
    )  # fmt: skip


def hint_of(record: dict[str, Any], form: str, depth: float) -> dict[str, Any]:
    """What an arm's rollout would have recorded, leaves [L, B, T, ...] over its layers, and the KV scales."""
    scales = {kv.SCALES: jax.tree.map(lambda leaf: leaf[0], record[kv.SCALES])}
    if form == "none":
        return scales
    first = Capture(sites=(SITE,), depth=depth).first_layer(record[SITE].scales.shape[2])
    codes = {name: record[name] for name in (SITE, kv.NAME)}
    deep = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, :, first:], 2, 0), codes)
    return scales | deep | ({SITE: compact(deep[SITE])} if form == "compact" else {})


def by_rows(params: Any, out: Any, hint: Any, *, rows: int, config: ModelConfig, side: Side) -> Any:
    """`scored`, that many rows at a time: log-probs and values on the host."""
    found = []
    for first in range(0, out.tokens.shape[0], rows):
        here = slice(first, first + rows)
        part = {
            name: tree if name == kv.SCALES else jax.tree.map(lambda leaf, here=here: leaf[:, here], tree)
            for name, tree in hint.items()
        }
        tokens = (out.tokens[here], out.token_mask[here])
        found.append(jax.device_get(scored(params, tokens, part, config=config, side=side)))
    values, codes = zip(*found, strict=True)
    return np.concatenate(values), np.concatenate(codes, axis=1)


@partial(jax.jit, static_argnames=("config", "side"))
def scored(
    params: Any, given: tuple[Any, Any], hint: Any, *, config: ModelConfig, side: Side
) -> tuple[jax.Array, Any]:
    """Log-probs [B, T - 1] of every token but the first, nats; the values at the site [L, B, T - 1, K]."""
    fed = {
        name: tree if name == kv.SCALES else jax.tree.map(lambda leaf: leaf[:, :, :-1], tree)
        for name, tree in hint.items()
    }
    tokens, mask = given[0][:, :-1], given[1][:, :-1]
    found = models.forward(
        models.fuse(params), tokens, config=config, side=side, positions=models.positions_of(mask),
        token_mask=mask, hint=fed, capture=Capture(sites=(SITE,), depth=1.0, form="full"),
    )  # fmt: skip
    hidden, wanted = found.hidden.reshape(-1, config.d_model), given[1][:, 1:].reshape(-1)
    values, _ = models.token_logprobs(
        models.fuse(params), hidden, given[0][:, 1:].reshape(-1), temperature=1.0, mask=wanted
    )
    codes = found.captured[SITE]
    return values.reshape(tokens.shape), codes.fmt.element(codes.codes())


def compare(values: Any, codes: Any, out: Any) -> dict[str, float]:
    """An arm against the rollout: share of values at the site that differ, and the gap in nats."""
    record = out.guidance[SITE]
    theirs = np.moveaxis(np.asarray(record.fmt.element(record.codes())), 2, 0)[:, :, :-1]
    real = np.asarray(out.token_mask)
    fed = (real & (np.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 1))[:, :-1]
    flips = (np.asarray(codes) != theirs)[:, fed].mean(axis=(1, 2))  # [L]
    drawn = np.asarray(out.loss_mask)[:, 1:]
    diff = (np.asarray(values, np.float64) - np.asarray(out.rollout_logprobs, np.float64)[:, 1:])[drawn]
    return {
        "flips": float(flips.mean()),
        "flips_deep": float(flips[len(flips) // 2 :].mean()),
        "gap_mean": float(np.abs(diff).mean()),
        "gap_max": float(np.abs(diff).max()),
        "k3": float(np.mean(np.exp(diff) - 1 - diff)),
        "tokens": int(drawn.sum()),
    }


def table(arms: dict[str, dict[str, float]]) -> str:
    """The arms as markdown."""
    lines = [
        "| guidance | bytes a token | flips | in the deeper half | mean gap, nats | max | k3 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, a in arms.items():
        shares = f"{100 * a['flips']:.2f} % | {100 * a['flips_deep']:.2f} %"
        gap = f"{a['gap_mean']:.4f} | {a['gap_max']:.2f} | {a['k3']:.4f}"
        lines.append(f"| {name} | {a['bytes']:.0f} | {shares} | {gap} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every arm and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2")
    asked = parser.parse_args()
    loaded = interchange.load(asked.model, dtype="float32")
    trainer, rollout = sides(loaded.config)
    out = sampled(loaded, rollout)
    record: dict[str, Any] = {"model": asked.model.name, "jax": jax.__version__}
    record |= {"device": jax.devices()[0].device_kind, "kv": "nvfp4", "rollout": rollout.dtype, "gaps": {}}
    for gap in ("none", "dtype", "rows"):
        side = dataclasses.replace(trainer, dtype=DTYPES["trainer"]) if gap == "dtype" else trainer
        rows = GROUP if gap == "rows" else out.tokens.shape[0]
        arms = arms_of(loaded, out, side, rollout, rows=rows)
        record["gaps"][gap] = {"trainer": side.dtype, "rows": rows, "arms": arms}
        path = ROOT / f"benchmarks/results/guidance_{asked.model.name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"engine_gap = {gap}\n\n{table(arms)}", flush=True)


def arms_of(loaded: Loaded, out: Any, trainer: Side, rollout: Side, *, rows: int) -> dict[str, Any]:
    """Every arm under one gap between the engines."""
    arms: dict[str, dict[str, float]] = {}
    for form, depth in ARMS:
        hint = hint_of(out.guidance, form, depth)
        values, codes = by_rows(loaded.params, out, hint, rows=rows, config=loaded.config, side=trainer)
        kept = 0
        if form != "none":
            stored = "full" if form == "full" else "compact"
            capture = Capture(sites=(SITE,), depth=depth, form=stored, kv="full")
            specs = rollout.specs.capturing(capture)
            kept = guidance.record_bytes(loaded.config, specs, rollout.kv)
        arms[f"{form} {depth:g}" if form != "none" else form] = {"bytes": kept} | compare(values, codes, out)
        print(table(arms).splitlines()[-1], flush=True)
    return arms


if __name__ == "__main__":
    main()
