"""Rollouts whose FP4 weights stay packed: are they right on this GPU, and how fast, beside bfloat16.

    python benchmarks/rollout_packed.py check --json OUTPUT.json
    python benchmarks/rollout_packed.py time --layers 7 --rows 32 512 --json OUTPUT.json

`check`, for every recipe: each quantized site alone (operands equal bit for bit to those of the decoded path,
the product within the accumulator's bound), then a rollout of a small random model both ways, its codes
recorded: the share that differs, by layer, and how far apart the log-probs of equal tokens are. A flipped
code can move a log-prob by whole nats, so only the first layer's first site, whose input is the same, must be
equal for "right".

`time`: whole rollouts at Qwen3-1.7B's shapes with random weights, `--layers` of its 28 and as much less
vocabulary; medians of `--repeats` calls after one that compiles. "decoded" is the same recipe with weights
decoded to bfloat16 before the loop. A call that takes one token is subtracted for the decode rate.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import provenance

import pallas_kernels.packed_matmul
from benchmarks.rl_step import MODELS, Shape, rollout_of, shallow, sides, timed
from fp4rl_jax import models, ops
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops import packed, packing
from fp4rl_jax.ops.spec import Capture, Side
from fp4rl_jax.rollout import Published, SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.runs import precision
from pallas_kernels import formats as packed_formats
from pallas_kernels.testing import accumulation_bound

RECIPES = ("naive_nvfp4", "quads", "rollout_resq", "qat_w4a16")
SMALL = ModelConfig(
    family="qwen3", vocab_size=2048, num_layers=4, d_model=512, num_heads=8, num_kv_heads=4, head_dim=64,
    d_ff=1536, qk_norm=True, max_length=512,
)  # fmt: skip


@contextlib.contextmanager
def weights(kept: str) -> Iterator[None]:
    """Within it weights are "packed", the kernel trusted whether or not its file says so, or "decoded"."""
    before = pallas_kernels.packed_matmul.IMPLS, packing.IN_REGISTERS
    first, *others = before[0]
    trusted = dataclasses.replace(first, verified_on=first.verified_on or ("this run",))
    pallas_kernels.packed_matmul.IMPLS = (trusted, *others)
    packing.IN_REGISTERS = before[1] if kept == "packed" else ()
    jax.clear_caches()
    yield
    pallas_kernels.packed_matmul.IMPLS, packing.IN_REGISTERS = before
    jax.clear_caches()


def published_of(config: ModelConfig, side: Side, dtype: str) -> Published:
    """Random weights, published; where a site asks for a calibration, one that prefers some channels."""
    params = models.init_params(config, jax.random.key(0), dtype=dtype)

    def seen(leaf: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.key(leaf.shape[-1]), leaf.shape, leaf.dtype, 0.1, 1.0)

    calibration = jax.tree.map(seen, calibrate.empty(config, side))
    return publish(params, config=config, side=side, version=0, calibration=calibration)


# ---- check ----------------------------------------------------------------------------------------
def check_site(name: str, weight: Any, side: Side, rows: int) -> dict[str, Any]:
    """One layer's site: operands against those of the decoded path, and the product against its bound."""
    spec = side.specs[name]
    weight = jax.tree.map(lambda leaf: leaf[0], weight)
    ready = ops.pack_weight(weight, site=name, side=side)
    w, q = getattr(ready, "weight", ready), getattr(weight, "weight", weight)
    if not isinstance(w, ops.Packed):
        return {"packed": False}
    n, k = w.shape
    x = (jax.random.normal(jax.random.key(rows), (rows, k)) * 3).astype(jnp.bfloat16)
    facts = packing.matmul_facts(spec, (n, k), machines.current(), order="free", x_dtype="bfloat16", rows=0)
    first, row_scale, second = jax.jit(lambda x, w: packed._operands(x, w, spec, facts))(x, w)
    columns, order = getattr(weight, "columns", None), np.arange(k)
    if columns is not None:
        order = np.concatenate([columns, np.setdiff1d(order, columns)])
    got, want = [natural(first, row_scale, w.fmt, k)], terms(x, spec, columns)
    if second is not None:
        got.append(natural(second, row_scale, w.fmt, want[1].shape[1]))
    equal = [bool((want[0][:, order] == got[0]).all())]
    equal += [bool((a == b).all()) for a, b in zip(want[1:], got[1:], strict=True)]
    y = np.asarray(jax.jit(lambda x, w: ops.matmul(x, w, spec, out_dtype=jnp.float32))(x, ready), np.float64)
    values = np.asarray(q.dequantize(), np.float64)
    parts = [(want[0], values)] + [
        (part, values if columns is None else values[:, np.asarray(columns)]) for part in want[1:]
    ]
    bound = 2 * sum(accumulation_bound(a, b) for a, b in parts)
    apart = np.abs(y - sum(a @ b.T for a, b in parts))
    return {"packed": True, "operands_equal": equal, "error_over_bound": float((apart / bound).max())}


def natural(operand: jax.Array, row_scale: jax.Array, fmt: str, k: int) -> np.ndarray:
    """float64 values of an operand, columns in the natural order."""
    values = np.asarray(packed_formats.natural_k(operand, fmt), np.float64)[:, :k]
    return values * np.asarray(row_scale, np.float64)[:, None]


def terms(x: jax.Array, spec: ops.MatmulSpec, columns: jax.Array | None) -> list[np.ndarray]:
    """float64 values of the activation's terms on the decoded path."""
    if spec.act is None:
        return [np.asarray(x, np.float64)]
    parts = [spec.act.inner(x)]
    if spec.residual is not None:
        parts = list(spec.residual.split(x, spec.act, dtype=jnp.float32, columns=columns))
    return [np.asarray(v if outer is None else v * outer, np.float64) for v, outer in parts]


def recorded(side: Side) -> Side:
    """The same side, recording the codes of every site that has any."""
    if side.specs["mlp/down"].act is None:
        return side
    sites = tuple(site for site, _ in side.specs.items)
    return dataclasses.replace(side, specs=side.specs.capturing(Capture(sites=sites, depth=1.0, form="full")))


def rollout_once(published: Published, config: ModelConfig, side: Side, temperature: float) -> Any:
    """32 rows of 24 tokens after prompts of 16."""
    key = jax.random.key(1)
    prompts = jax.random.randint(key, (8, 16), 10, config.vocab_size)
    return sample(
        published, prompts, jnp.ones(prompts.shape, bool), row_limits=jnp.full(32, 24, jnp.int32),
        keys=row_keys(key, jnp.arange(32)), config=config, side=side, group_size=4,
        sampling=SamplingConfig(max_new_tokens=24, temperature=temperature),
    )  # fmt: skip


def apart(a: Any, b: Any) -> dict[str, Any]:
    """Two rollouts: equal tokens, the log-prob gap of rows up to their first difference, flipped codes."""
    same = np.cumprod(np.asarray(a.tokens) == np.asarray(b.tokens), axis=1).astype(bool)
    gap = np.abs(np.asarray(a.rollout_logprobs) - np.asarray(b.rollout_logprobs))[
        same & np.asarray(a.loss_mask)
    ]
    found: dict[str, Any] = {
        "rows_with_equal_tokens": float(same[:, -1].mean()),
        "logprob_gap": {"median": float(np.median(gap)), "largest": float(gap.max()), "tokens": gap.size},
    }
    for site in a.guidance or {}:
        flipped = []
        first, second = (jax.tree.leaves(out.guidance[site]) for out in (a, b))
        for layer in range(first[0].shape[2]):
            differ = [
                (np.asarray(p)[:, :, layer] != np.asarray(q)[:, :, layer])[same]
                for p, q in zip(first, second, strict=True)
            ]
            flipped.append(float(np.concatenate([d.reshape(-1) for d in differ]).mean()))
        found.setdefault("share_of_flipped_bytes", {})[site] = flipped
    return found


def check(recipe: str, temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Sites, then rollouts of the small model."""
    _, side = sides(recipe, SMALL)
    side, found = recorded(side), {}
    published = published_of(SMALL, side, "float32")
    with weights("packed"):
        found["sites"] = {}
        paths = {"attn/qkv": ("attn", "qkv"), "attn/out": ("attn", "out")}
        paths |= {"mlp/gate_up": ("mlp", "gate_up"), "mlp/down": ("mlp", "down")}
        for site, (group, leaf) in paths.items():
            weight = published.params["layers"][group][leaf]
            found["sites"][site] = {rows: check_site(site, weight, side, rows) for rows in (3, 300)}
        outs = [rollout_once(published, SMALL, side, t) for t in temperatures]
    with weights("decoded"):
        others = [rollout_once(published, SMALL, side, t) for t in temperatures]
    for t, out, other in zip(temperatures, outs, others, strict=True):
        found[f"temperature {t:g}"] = apart(out, other)
    flips = [
        found[f"temperature {t:g}"].get("share_of_flipped_bytes", {}).get("attn/qkv", [0.0])[0]
        for t in temperatures
    ]
    sites = [part for rows in found["sites"].values() for part in rows.values()]
    found["right"] = not any(flips) and all(
        part["packed"] and all(part["operands_equal"]) and part["error_over_bound"] <= 1 for part in sites
    )
    return found


# ---- time -----------------------------------------------------------------------------------------
def time_rollouts(recipe: str, kept: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Seconds of whole rollouts of every number of rows; rows after the deadline are left out by name."""
    config = shallow(MODELS["qwen3_1_7b"], options.layers)
    _, side = sides(recipe, config)
    found: dict[str, Any] = {}
    with weights(kept):
        published = published_of(config, side, "bfloat16")
        found["implementations"] = sorted({r.impl for r in precision.reports("rollout", side, config)})
        for rows in options.rows:
            if time.monotonic() > deadline:
                found[str(rows)] = "left out: the time was over"
                continue
            group = min(8, rows)
            shape = Shape(
                prompts=rows // group, group=group, prompt_width=64, tokens=options.tokens, microbatch=rows
            )
            call = rollout_of(published, config, side, shape, "stacked")
            seconds = timed(
                {"whole": lambda: call(options.tokens).tokens, "one": lambda: call(1).tokens},  # noqa: B023
                options.repeats,
            )
            whole, one, first = seconds["whole"], seconds["one"], seconds["whole_first"]
            rate = rows * (options.tokens - 1) / (whole - one)
            step = (whole - one) / (options.tokens - 1)
            found[str(rows)] = {
                "rollout": whole, "compile_and_first": first, "first_token": one,
                "decode_tokens_per_second": rate, "decode_step_ms": 1e3 * step,
            }  # fmt: skip
    return found


def main() -> None:
    """Runs one part and writes JSON as it goes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("check", "time"))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--budget", type=float, default=130.0, help="seconds after which nothing new starts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        **provenance.facts(),
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "found": {},
    }
    deadline = time.monotonic() + options.budget
    jobs = [(recipe, "") for recipe in options.recipes]
    if options.part == "time":
        jobs = [("bf16", "packed"), *((r, kept) for kept in ("packed", "decoded") for r in options.recipes)]
    for recipe, kept in jobs:
        name = f"{recipe} {kept}".strip()
        if time.monotonic() > deadline:
            record["found"][name] = "left out: the time was over"
        elif options.part == "check":
            record["found"][name] = check(recipe, tuple(options.temperatures))
        else:
            record["found"][name] = time_rollouts(recipe, kept, options, deadline)
        print(json.dumps({name: record["found"][name]}), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
