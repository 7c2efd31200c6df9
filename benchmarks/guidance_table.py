"""Code flips and log-prob gap of a W4A4 trainer against a rollout, without and with guidance (TRACE).

    python benchmarks/guidance_table.py [--model models/smollm2]

The rollout runs in bfloat16 and records the MLP's input in full at every layer; the trainer runs in float32
on the same tokens, so that the dtype is the gap between the engines. Every arm is given what its form and
depth would have recorded. Prints a table; writes benchmarks/results/guidance_MODEL.json.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import interchange, models
from fp4rl_jax.interchange import Loaded
from fp4rl_jax.models import ModelConfig, guidance
from fp4rl_jax.ops.spec import Capture, Side
from fp4rl_jax.quantizers import compact
from fp4rl_jax.recipes import trace
from fp4rl_jax.rollout import SamplingConfig, publish, row_keys, sample
from fp4rl_jax.text import encode_prompts

ROOT = Path(__file__).parent.parent
SITE = "mlp/gate_up"
GROUP, WIDTH, NEW = 2, 48, 12
ARMS = [("none", 0.0), *((form, depth) for form in ("full", "compact") for depth in (1.0, 0.5, 0.25))]


def sides(config: ModelConfig) -> tuple[Side, Side]:
    """A float32 trainer that is guided where it has a hint, and a bfloat16 rollout that records all."""
    settings = trace.Config(form="full", depth=1.0)
    sites = models.sites(config)
    trainer, rollout = trace.trainer(settings).resolve(sites), trace.rollout(settings).resolve(sites)
    return Side(specs=trainer, dtype="float32"), Side(specs=rollout, dtype="bfloat16")


def sampled(loaded: Loaded, side: Side) -> Any:
    """Rollouts of six sums, two answers each."""
    texts = [f"What is {a} + {17 - a}? Explain in one sentence." for a in range(6)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    tokens, mask = encode_prompts(loaded.tokenizer, chats, width=WIDTH)
    rows = len(texts) * GROUP
    published = publish(loaded.params, config=loaded.config, side=side, version=0)
    sampling = SamplingConfig(
        max_new_tokens=NEW, stop_tokens=loaded.tokenizer.stop_ids, pad_token=loaded.tokenizer.pad_id
    )
    return sample(
        published, jnp.asarray(tokens), jnp.asarray(mask), row_limits=jnp.full(rows, NEW, jnp.int32),
        keys=row_keys(jax.random.key(0), jnp.arange(rows)), config=loaded.config, side=side,
        sampling=sampling, group_size=GROUP,
    )  # fmt: skip


def hint_of(record: Any, form: str, depth: float) -> dict[str, Any]:
    """What an arm's rollout would have recorded, stacked over its layers."""
    if form == "none":
        return {}
    first = Capture(sites=(SITE,), depth=depth).first_layer(record.scales.shape[2])
    deep = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, :, first:], 2, 0), record)
    return {SITE: compact(deep) if form == "compact" else deep}


@partial(jax.jit, static_argnames=("config", "side"))
def scored(params: Any, out: Any, hint: Any, *, config: ModelConfig, side: Side) -> tuple[jax.Array, Any]:
    """Log-probs [B, T - 1] of every token but the first, nats; the values at the site [L, B, T - 1, K]."""
    fed = jax.tree.map(lambda leaf: leaf[:, :, :-1], hint)
    tokens, mask = out.tokens[:, :-1], out.token_mask[:, :-1]
    found = models.forward(
        models.fuse(params), tokens, config=config, side=side, positions=models.positions_of(mask),
        token_mask=mask, hint=fed, capture=Capture(sites=(SITE,), depth=1.0, form="full"),
    )  # fmt: skip
    hidden, wanted = found.hidden.reshape(-1, config.d_model), out.token_mask[:, 1:].reshape(-1)
    values, _ = models.token_logprobs(
        models.fuse(params), hidden, out.tokens[:, 1:].reshape(-1), temperature=1.0, mask=wanted
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
    arms: dict[str, dict[str, float]] = {}
    for form, depth in ARMS:
        hint = hint_of(out.guidance[SITE], form, depth)
        values, codes = scored(loaded.params, out, hint, config=loaded.config, side=trainer)
        kept = 0
        if form != "none":
            capture = Capture(sites=(SITE,), depth=depth, form="full" if form == "full" else "compact")
            kept = guidance.record_bytes(loaded.config, rollout.specs.capturing(capture))
        arms[f"{form} {depth:g}" if form != "none" else form] = {"bytes": kept} | compare(values, codes, out)
        print(table(arms).splitlines()[-1], flush=True)
    record = {"model": asked.model.name, "jax": jax.__version__, "arms": arms}
    record |= {"device": jax.devices()[0].device_kind, "trainer": "float32", "rollout": "bfloat16"}
    path = ROOT / f"benchmarks/results/guidance_{asked.model.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(table(arms), end="")


if __name__ == "__main__":
    main()
