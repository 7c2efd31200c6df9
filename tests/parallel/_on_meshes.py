"""What one mesh gives beside one device, as JSON: `_on_meshes.py dense|moe|moe_uneven FOLDER`.

Run in a process of its own, which sets the simulated devices before jax starts. The masters are the same
bits on both sides of every comparison. Prints nothing; writes FOLDER/found.json.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp4rl_jax import formats, models
from fp4rl_jax.algorithms import grpo
from fp4rl_jax.batch import TrainBatch
from fp4rl_jax.corrections import tis
from fp4rl_jax.loop import Bound
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Capture, MatmulSpec, Side, SiteSpecs
from fp4rl_jax.parallel import Layout, MeshConfig, make_mesh, put, put_rows
from fp4rl_jax.quantizers import Quantizer
from fp4rl_jax.rollout import SamplingConfig, publish, row_keys, sample, weight_checksums
from fp4rl_jax.runs import Checkpointer
from fp4rl_jax.trainer import (
    Learner,
    OptimConfig,
    TrainerConfig,
    abstract_state,
    init_state,
    plan,
    score_batch,
    update,
)

PROMPTS, GROUP, WIDTH, NEW = 2, 4, 10, 5
ROWS = PROMPTS * GROUP
COMMON: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_length": 64,
}
MODELS = {
    "dense": ModelConfig(vocab_size=96, d_model=128, d_ff=128, **COMMON),
    "moe": ModelConfig(
        family="qwen3_moe", vocab_size=96, d_model=64, qk_norm=True, num_experts=4, num_active=2,
        d_expert=128, **COMMON,
    ),
}  # fmt: skip
MODELS["moe_uneven"] = dataclasses.replace(MODELS["moe"], num_experts=3)  # over two devices
MESHES = {
    "dense": (MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=4, fsdp=2)),
    "moe": (MeshConfig(data=2, tensor=2, expert=2), MeshConfig(fsdp=4, expert=2)),
    "moe_uneven": (MeshConfig(data=2, tensor=2, expert=2), MeshConfig(fsdp=2, expert=4)),
}
UNIT = 2.0**-24  # half a unit in the last place of float32
CAP, NOISE = 2.0, 1e-2


def side(config: ModelConfig, layout: Layout | None, *, order: str = "free", **spec: Any) -> Side:
    items = tuple((site, MatmulSpec(**spec)) for site in models.sites(config))
    return Side(specs=SiteSpecs(items=items), dtype="float32", order=order, layout=layout)  # type: ignore[arg-type]


def learner(config: ModelConfig, side: Side, paths: Any) -> Learner:
    """One update on two microbatches; the first moment is then the gradient."""
    settings = TrainerConfig(
        dtype="float32", frozen_dtype="float32", microbatch_rows=ROWS // 2, remat="none",
        optim=OptimConfig(lr=1e-4, clip_norm=None),
    )  # fmt: skip
    return Learner(
        model=config, side=side, config=settings, subset=plan(paths, ("*",), num_layers=config.num_layers),
        loss=Bound(grpo.loss, grpo.Config()), weights=Bound(tis.weights, tis.Config(cap=CAP)),
    )  # fmt: skip


def masters(config: ModelConfig) -> Any:
    """Random parameters, wide enough that the model has opinions."""
    params = models.init_params(config, jax.random.key(1))
    return jax.tree.map(lambda x: x if x.ndim < 2 else x * 2, params)


def tokens(config: ModelConfig, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ragged prompts, left-padded with token 0, and ragged completions; a group lies on several devices."""
    found = rng.integers(1, config.vocab_size, (ROWS, WIDTH + NEW), dtype=np.int32)
    found[:, :WIDTH] = np.repeat(found[::GROUP, :WIDTH], GROUP, axis=0)
    mask = np.ones(found.shape, bool)
    mask[:GROUP, :3] = False
    for row, length in enumerate(rng.integers(1, NEW + 1, ROWS)):
        mask[row, WIDTH + length :] = False
    return np.where(mask, found, 0), mask


def batch(config: ModelConfig, rollout_logprobs: np.ndarray, rng: np.random.Generator) -> TrainBatch:
    found, mask = tokens(config, rng)
    loss_mask = mask & (np.arange(WIDTH + NEW) >= WIDTH)
    noise = NOISE * rng.standard_normal(mask.shape).astype(np.float32)
    return TrainBatch(
        tokens=found, token_mask=mask, loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, rollout_logprobs + noise, 0).astype(np.float32),
        advantages=rng.standard_normal(ROWS).astype(np.float32), prompt_width=WIDTH, group_size=GROUP,
    )  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits, wherever they live."""
    equal = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(equal))


class Pair:
    """One device and a mesh, with the same masters."""

    def __init__(self, family: str):
        self.config = MODELS[family]
        mesh, other = (Layout(mesh=make_mesh(sizes)) for sizes in MESHES[family])
        self.layouts: tuple[Layout | None, Layout] = (None, mesh)
        self.other = other
        self.params = masters(self.config)
        self.spread = jax.tree.map(put, self.params, models.shardings(self.config, mesh.mesh))

    def both(self, fn: Any) -> tuple[Any, Any]:
        """fn(layout, parameters) on one device and on the mesh, brought to the host."""
        one, many = (fn(*each) for each in zip(self.layouts, (self.params, self.spread), strict=True))
        return jax.device_get((one, many))


def weights(pair: Pair, fmt: str) -> dict[str, bool]:
    """Codes, scale bytes and outer scales of every site; the trainer's own quantization by checksum."""
    quantizer = Quantizer(formats.make(fmt))

    def make(layout: Layout | None, params: Any) -> Any:
        rollout = side(pair.config, layout, weight=quantizer)
        models.require_whole_blocks(pair.config, rollout, name="rollout")
        published = publish(params, config=pair.config, side=rollout, version=0)
        sums = weight_checksums(params, config=pair.config, side=rollout)
        return published.params, published.checksums, sums

    (one, sums, trained), (many, many_sums, many_trained) = pair.both(make)
    found = {f"{site} {part}": same(a, b) for site, part, a, b in _parts(one, many)}
    return found | {
        "unquantized": same(_without_sites(one), _without_sites(many)),
        "checksums": same(sums, many_sums) and same(trained, many_trained) and same(sums, trained),
    }


def _parts(one: Any, many: Any):
    taken: dict[str, list[Any]] = {}
    for tree in (one, many):
        models.map_sites(lambda site, q: taken.setdefault(site, []).append(q) or q, tree)
    for site, (a, b) in taken.items():
        for part in ("packed", "scales", "outer_scale"):
            if getattr(a, part) is not None:
                yield site, part, getattr(a, part), getattr(b, part)


def _without_sites(tree: Any) -> Any:
    return models.map_sites(lambda site, q: None, tree)


def sampled(pair: Pair, spec: dict[str, Any], order: str) -> dict[str, Any]:
    """Rollouts of both, from the same keys."""
    rng = np.random.default_rng(3)
    prompts, mask = (x[::GROUP, :WIDTH] for x in tokens(pair.config, rng))
    keys = row_keys(jax.random.key(5), np.arange(ROWS))

    def make(layout: Layout | None, params: Any) -> Any:
        rollout = side(pair.config, layout, order=order, **spec)
        published = publish(params, config=pair.config, side=rollout, version=0)
        return sample(
            published, prompts, mask, row_limits=np.full(ROWS, NEW, np.int32), keys=keys, config=pair.config,
            side=rollout, sampling=SamplingConfig(max_new_tokens=NEW, stop_tokens=(1,), pad_token=0),
            group_size=GROUP,
        )  # fmt: skip

    one, many = pair.both(make)
    agree = np.cumprod(one.tokens == many.tokens, axis=1).astype(bool)
    gap = np.abs(one.rollout_logprobs - many.rollout_logprobs)
    return {
        "tokens": same(one.tokens, many.tokens),
        "logprobs": same(one.rollout_logprobs, many.rollout_logprobs),
        "gap": float(gap[agree].max()),
    }


def gradient(state: Any) -> dict[str, np.ndarray]:
    """The gradient that the first update saw, joined as `fuse` joins the weights; by path."""
    first = optax.tree.get(state.opt_state, "mu")
    tree = models.fuse(dataclasses.replace(state, trainable=first, frozen={}).params)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) / 0.1 for p, x in leaves}


def stepped(pair: Pair, given: TrainBatch) -> Any:
    """One update with W4A16 on both sides: outcome and gradient; the state of the mesh stays there."""
    kept = {}

    def make(layout: Layout | None, params: Any) -> Any:
        trainer = side(pair.config, layout, weight=Quantizer("nvfp4"))
        made = learner(pair.config, trainer, params)
        state = init_state(
            jax.tree.map(jnp.copy, params), made.subset, made.config, shardings=_places(pair, made)
        )
        step = jax.jit(update, static_argnames="learner", donate_argnums=0 if layout is None else (0, 1))
        after, outcome = step(state, put_rows(given, layout), learner=made)
        kept[layout is None] = (after, made)
        return outcome, {"donated": all(x.is_deleted() for x in state.trainable.values())}

    outcomes = pair.both(make)
    return outcomes, kept


def _places(pair: Pair, made: Learner) -> Any:
    if made.side.layout is None:
        return None
    shapes = abstract_state(models.abstract_params(pair.config), made.subset, made.config)
    return models.params_shardings(shapes, pair.config, made.side.layout)


def weight_only(pair: Pair) -> tuple[dict[str, Any], Any]:
    """Losses, log-probs and gradients of both, with the bounds that `bounds` derives."""
    rng = np.random.default_rng(7)
    given = batch(pair.config, np.full((ROWS, WIDTH + NEW), -np.log(pair.config.vocab_size)), rng)
    trainer = side(pair.config, None, weight=Quantizer("nvfp4"))
    made = learner(pair.config, trainer, pair.params)
    state = init_state(pair.params, made.subset, made.config)
    current = jax.jit(partial(score_batch, learner=made))(state, given)
    given = batch(pair.config, np.asarray(current), np.random.default_rng(7))
    (((one, was), (many, is_now)), kept) = stepped(pair, given)
    lp_bound, grad_bound = bounds(pair, given)
    grads = [gradient(kept[which][0]) for which in (True, False)]
    scored = given.loss_mask
    apart = np.abs(one.trainer_logprobs - many.trainer_logprobs)[scored]
    found = {
        "donated": [was["donated"], is_now["donated"]],
        "applied": [bool(one.applied), bool(many.applied)],
        "loss": [float(one.loss), float(many.loss)],
        "loss_bound": float(CAP * np.abs(given.advantages).max() * lp_bound[scored].max()),
        "logprobs": float(apart.max()),
        "logprobs_over_bound": float((apart / lp_bound[scored]).max()),
        "logprobs_bound": float(lp_bound[scored].max()),
        "gradients": {
            path: [float(np.linalg.norm(grads[0][path] - grads[1][path])), grad_bound[path],
                   float(np.linalg.norm(grads[0][path]))]
            for path in grad_bound
        },
    }  # fmt: skip
    return found, kept


def bounds(pair: Pair, given: TrainBatch) -> tuple[np.ndarray, dict[str, float]]:
    """How far two orders of the same float32 sums may lie apart, to first order.

    A dot product of n terms in any order is the exact one of factors perturbed by at most n u relatively
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). The sums of a layer are its dots over
    K inputs, the norms over D, the scores over C and the softmax and its values over S; each is charged to
    the weights beside it, so that each weight moves by at most (K + D + C + 2 S) u. The log-sum-exp adds
    V u. Two orders lie at most twice that apart:

        |d logprob| <= 2 (sum over weights of |d logprob / d w| |w| gamma + V u)

    A gradient moves with the weights, which is measured with perturbations of random signs, and its own
    products are dots again, whose terms are at most the rows' own gradients in size.

    Returns:
        [B, T] of the log-probs; norms of the gradients' leaves, by path in the fused tree.
    """
    config = pair.config
    rollout = side(config, None, weight=Quantizer("nvfp4"))
    published = publish(pair.params, config=config, side=rollout, version=0).params
    plain = models.map_sites(lambda site, q: q.dequantize(jnp.float32), published)
    widest = max(config.d_model, config.num_heads * config.head_dim, config.d_ff, config.d_expert)
    gamma = (widest + config.d_model + config.head_dim + 2 * (WIDTH + NEW)) * UNIT
    lp = 2 * (gamma * _condition(config, plain, given) + config.vocab_size * UNIT)
    return lp, _gradient_bounds(config, plain, given, gamma=gamma)


def _condition(config: ModelConfig, plain: Any, given: TrainBatch) -> np.ndarray:
    """[B, T]: sum over weights of |d logprob / d w| |w|."""
    exact = side(config, None)

    def logprobs(tree: Any) -> jax.Array:
        return models.score(
            tree, given.tokens, given.token_mask, prompt_width=WIDTH, group_size=GROUP, config=config,
            side=exact, temperature=1.0,
        ).logprobs  # fmt: skip

    @jax.jit
    def all_rows(tree: Any) -> jax.Array:
        value, pull = jax.vjp(logprobs, tree)

        def one(place: jax.Array) -> jax.Array:
            (slopes,) = pull(jnp.zeros(value.size).at[place].set(1.0).reshape(value.shape))
            return sum(
                jnp.sum(jnp.abs(s * w)) for s, w in zip(*map(jax.tree.leaves, (slopes, tree)), strict=True)
            )

        return jax.lax.map(one, jnp.arange(value.size)).reshape(value.shape)

    return np.asarray(all_rows(plain))


def _gradient_bounds(config: ModelConfig, plain: Any, given: TrainBatch, *, gamma: float) -> dict[str, float]:
    made = learner(config, side(config, None), plain)
    step = jax.jit(partial(update, learner=made))

    def at(tree: Any, advantages: np.ndarray) -> dict[str, np.ndarray]:
        state = init_state(tree, made.subset, made.config)
        return gradient(step(state, dataclasses.replace(given, advantages=advantages))[0])

    middle, rng = at(plain, given.advantages), np.random.default_rng(11)
    size, moved = 2.0**-10, dict.fromkeys(middle, 0.0)
    for _ in range(4):
        turned = jax.tree.map(
            lambda w: w * (1 + size * rng.choice([-1, 1], w.shape)).astype(np.float32), plain
        )
        for path, leaf in at(turned, given.advantages).items():
            moved[path] = max(moved[path], float(np.linalg.norm(leaf - middle[path])) / size)
    own = dict.fromkeys(middle, 0.0)
    for row in range(ROWS):
        alone = np.where(np.arange(ROWS) == row, given.advantages, 0).astype(np.float32)
        for path, leaf in at(plain, alone).items():
            own[path] += float(np.linalg.norm(leaf))
    return {path: 2 * gamma * (moved[path] + own[path]) for path in middle}


def quantized(pair: Pair, order: str) -> dict[str, Any]:
    """W4A4: the share of activation codes that differ, and the gap of the log-probs."""
    rng = np.random.default_rng(13)
    found, mask = tokens(pair.config, rng)
    act = Quantizer(formats.make("nvfp4", outer="row"))
    sites = tuple(site for site in models.sites(pair.config) if site != "experts/down")

    def make(layout: Layout | None, params: Any) -> Any:
        trainer = side(pair.config, layout, order=order, weight=Quantizer("nvfp4"), act=act)
        seen, real = put_rows((found, mask), layout)

        @jax.jit
        def run(params: Any, seen: Any, real: Any) -> Any:
            tree = models.in_use(models.fuse(params), pair.config, trainer, reads="once")
            captured = models.forward(
                tree, seen, config=pair.config, side=trainer, positions=models.positions_of(real),
                token_mask=real, capture=Capture(sites=sites, form="full"),
            ).captured  # fmt: skip
            scores = models.score(
                tree, seen, real, prompt_width=WIDTH, group_size=GROUP, config=pair.config, side=trainer,
                temperature=1.0,
            )  # fmt: skip
            return {site: q.codes() for site, q in captured.items()}, scores.logprobs

        return run(params, seen, real)

    (codes, lp), (many_codes, many_lp) = pair.both(make)
    flips = {site: float(np.mean((codes[site] != many_codes[site])[:, mask])) for site in codes}
    return {"flipped": flips, "equal": same(lp, many_lp), "gap": float(np.abs(lp - many_lp).max())}


def checkpoint(pair: Pair, kept: Any, folder: Path) -> dict[str, bool]:
    """The mesh's state after its update, restored on one device, on the mesh and on another mesh."""
    after, made = kept[False]
    store = Checkpointer(folder / "checkpoints")
    store.save(1, after, {"position": 1})
    found = {}
    shapes = abstract_state(models.abstract_params(pair.config), made.subset, made.config)
    for name, layout in (("one", None), ("same", pair.layouts[1]), ("other", pair.other)):
        template = shapes
        if layout is not None:
            places = models.params_shardings(shapes, pair.config, layout)
            template = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, places)
        restored = store.restore(template).state
        found[name] = same(restored, after)
        if layout is not None:
            wanted = [leaf.sharding for leaf in jax.tree.leaves(template)]
            found[f"{name} placed"] = [leaf.sharding for leaf in jax.tree.leaves(restored)] == wanted
    return found


def main(family: str, folder: Path) -> None:
    pair = Pair(family)
    found: dict[str, Any] = {"weights": {fmt: weights(pair, fmt) for fmt in ("nvfp4", "mxfp4", "hif4")}}
    weight_spec: dict[str, Any] = {"weight": Quantizer("nvfp4")}
    if family != "moe_uneven":
        found["weight_only"], kept = weight_only(pair)
        found["checkpoint"] = checkpoint(pair, kept, folder)
        found["sampled"] = sampled(pair, weight_spec, "free")
    found["quantized"] = {order: quantized(pair, order) for order in ("free", "fixed")}
    act = Quantizer(formats.make("nvfp4", outer="row"))
    found["sampled_fixed"] = sampled(pair, {**weight_spec, "act": act}, "fixed")
    (folder / "found.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
