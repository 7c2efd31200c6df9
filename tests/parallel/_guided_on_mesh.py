"""A packed KV cache and guidance on data=2 x tensor=2 beside one device: `_guided_on_mesh.py NAME FOLDER`.

Run in a process of its own, which sets the simulated devices before jax starts. Both sides of a comparison
have the same masters. Prints nothing; writes FOLDER/found.json.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models, plugins, recipes
from fp4rl_jax.algorithms import grpo
from fp4rl_jax.algorithms._common import train_batch
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.corrections import none
from fp4rl_jax.loop import Bound
from fp4rl_jax.models import ModelConfig, kv
from fp4rl_jax.ops.spec import Capture, Side, SideSpec
from fp4rl_jax.parallel import Layout, MeshConfig, make_mesh, put
from fp4rl_jax.parallel.memory import HOST
from fp4rl_jax.quantizers import Guided, Quantizer
from fp4rl_jax.recipes._parts import kv_of
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.trainer import (
    Learner,
    OptimConfig,
    TrainerConfig,
    abstract_state,
    init_state,
    place,
    plan,
    score_batch,
    update,
)

TRACE = plugins.load(recipes, "trace")
CONFIG = ModelConfig(
    vocab_size=32, num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=16, max_length=32
)
PROMPTS, GROUP, WIDTH, NEW = 2, 2, 5, 4
ROWS = PROMPTS * GROUP


def sides(name: str, layout: Layout | None, order: Any) -> tuple[Side, Side]:
    """`trace` with every layer guided, or a format's cache alone, recorded, beside unquantized matmuls."""
    if name == "trace":
        settings = TRACE.Config(depth=1.0, form="full")
        specs = TRACE.trainer(settings), TRACE.rollout(settings)
    else:
        cache = kv_of(name)
        specs = (
            SideSpec(kv=Quantizer(cache.fmt, Guided())),
            SideSpec(kv=cache, capture=Capture(sites=(), depth=1.0, kv="full")),
        )
    common: dict[str, Any] = {"dtype": "float32", "order": order, "layout": layout}
    names = models.sites(CONFIG)
    trainer, rollout = (Side(specs=spec.resolve(names), kv=spec.kv, **common) for spec in specs)
    return trainer, rollout


def drawn(name: str, layout: Layout | None, params: Any, order: str) -> Rollouts:
    """Rollouts whose cache is calibrated and packed on the devices of `layout`."""
    rng = np.random.default_rng(3)
    prompts = rng.integers(3, CONFIG.vocab_size, (PROMPTS, WIDTH), dtype=np.int32)
    mask = np.ones(prompts.shape, bool)
    mask[0, :2] = False
    _, side = sides(name, layout, order)
    models.require_whole_blocks(CONFIG, side, name="rollout")
    seen = calibrate.first(params, jnp.asarray(prompts), jnp.asarray(mask), config=CONFIG, side=side)
    published = publish(params, config=CONFIG, side=side, version=0, calibration=seen)
    found = sample(
        published, prompts, mask, row_limits=np.full(ROWS, NEW, np.int32), config=CONFIG, side=side,
        keys=row_keys(jax.random.key(5), np.arange(ROWS)), group_size=GROUP,
        sampling=SamplingConfig(max_new_tokens=NEW, stop_tokens=(1,), pad_token=0),
    )  # fmt: skip
    return jax.device_get(found)


def learner(side: Side, memory: Any) -> Learner:
    config = TrainerConfig(
        dtype="float32", frozen_dtype="float32", microbatch_rows=2, remat="none", logprob_chunk=8,
        guidance_memory=memory, optim=OptimConfig(lr=1e-2),
    )  # fmt: skip
    return Learner(
        model=CONFIG, side=side, config=config,
        subset=plan(models.abstract_params(CONFIG), ("*",), num_layers=CONFIG.num_layers),
        loss=Bound(grpo.loss, grpo.Config()), weights=Bound(none.weights, none.Config()),
    )  # fmt: skip


def learned(side: Side, params: Any, out: Rollouts, memory: str) -> Any:
    """Scores of the batch, outcome and state of an update, and the kinds of memory guidance waits in."""
    made = learner(side, memory)
    places = None
    if side.layout is not None:
        shapes = abstract_state(models.abstract_params(CONFIG), made.subset, made.config)
        places = models.params_shardings(shapes, CONFIG, side.layout)
    state = init_state(jax.tree.map(jnp.copy, params), made.subset, made.config, shardings=places)
    batch = train_batch(out, np.array([1, -1, 0.5, -0.5], np.float32), ref_logprobs=None)
    placed, held = place(batch, made.config, side.layout)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(held)}
    scores = jax.jit(score_batch, static_argnames="learner")(state, placed, None, held, learner=made)
    after, outcome = jax.jit(update, static_argnames="learner")(state, placed, None, held, learner=made)
    return jax.device_get((scores, outcome, after)), sorted(kinds)


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits."""
    equal = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(equal))


def codes(out: Rollouts) -> np.ndarray:
    """The cache's codes [B, T, L, 2, K, C], of every fed token."""
    return np.asarray(out.guidance[kv.NAME].codes())


def main(name: str, folder: Path) -> None:
    layout = Layout(mesh=make_mesh(MeshConfig(data=2, tensor=2), devices=jax.devices()[:4]))
    params = models.init_params(CONFIG, jax.random.key(1))
    params = jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params)
    spread = jax.tree.map(put, params, models.shardings(CONFIG, layout.mesh))
    found: dict[str, Any] = {}
    one, many = drawn(name, None, params, "fixed"), drawn(name, layout, spread, "fixed")
    found["sampled"] = {
        "tokens": same(one.tokens, many.tokens),
        "logprobs": same(one.rollout_logprobs, many.rollout_logprobs),
        "records": same(one.guidance, many.guidance),
        "codes": len(np.unique(codes(one))),
    }
    free = drawn(name, None, params, "free"), drawn(name, layout, spread, "free")
    agree = np.cumprod(free[0].tokens == free[1].tokens, axis=1).astype(bool)
    flips = (codes(free[0]) != codes(free[1]))[agree]
    found["free"] = {"flipped": float(flips.mean()), "first layer": float(flips[:, 0].mean())}
    here, there = sides(name, None, "fixed")[0], sides(name, layout, "fixed")[0]
    (on_one, _), (on_mesh, _) = learned(here, params, one, "device"), learned(there, spread, one, "device")
    in_host, kinds = learned(there, spread, one, "host")
    moved = jax.tree.map(lambda leaf: np.roll(leaf, 2, axis=0), one.guidance)
    swapped = learned(there, spread, dataclasses.replace(one, guidance=moved), "device")[0]
    scored = one.loss_mask
    found["guided"] = {
        "one": same(on_one[0], on_mesh[0]),
        "rollout": float(np.abs(on_mesh[0] - one.rollout_logprobs)[scored].max()),
        "host": same(on_mesh, in_host),
        "kinds": kinds == [HOST],
        "swapped": float(np.abs(swapped[0] - on_mesh[0])[scored].max()),
    }
    (folder / "found.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
