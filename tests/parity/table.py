"""Measures, per recipe, whether trainer and rollout are one policy; prints it as a table.

    python -m tests.parity.table [--checkpoint models/smollm2] [--json PATH] [--markdown PATH]

Three questions, on random tiny models (dense and with experts) in both orders, or on a checkpoint as
training runs it (bfloat16, free order):

* weights: are the published codes those of the trainer's own fake quantization?
* prefill = decode: does a block of tokens over the prompt give the log-probs of one-by-one decoding?
* trainer = rollout: does teacher-forced scoring by the trainer's side give the sampler's log-probs?

Equality is bit for bit. Where it does not hold, the share of tokens moved by more than 0.01 nat and
the share of flipped activation codes are the answer; nothing is hidden behind a tolerance.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import interchange, models
from fp4rl_jax.arrays import PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.interchange import Loaded
from fp4rl_jax.models import ModelConfig, logprobs
from fp4rl_jax.ops import unguided
from fp4rl_jax.ops.spec import Order, Side
from fp4rl_jax.rollout import (
    Published,
    SamplingConfig,
    calibrate,
    compare_checksums,
    publish,
    row_keys,
    sample,
    weight_checksums,
)
from fp4rl_jax.text import encode_prompts
from tests.parity.record import Sink, recording
from tests.rollout import tiny

REPLAYED = "_replay"
MODELS = (*tiny.CONFIGS, "moe" + REPLAYED)
MOVED = 0.01  # nat: a token whose log-prob differs by more counts as moved


@dataclasses.dataclass(frozen=True)
class Gap:
    """How two sets of log-probs of the same tokens differ.

    Attributes:
        tokens: how many were compared.
        equal: share that is equal bit for bit.
        largest: largest absolute difference, nats.
        moved: share that differs by more than 0.01 nat.
        k3: mean of exp(l) - 1 - l with l = first - second, nats per token.
    """

    tokens: int
    equal: float
    largest: float
    moved: float
    k3: float

    def __str__(self) -> str:
        if self.equal == 1.0:
            return "equal"
        return f"max {self.largest:.1e} nat, moved {100 * self.moved:.1f} %, k3 {self.k3:.1e}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    recipe: str
    model: str
    kv: str
    dtype: str
    order: str
    weights: str
    prefill_decode: Gap
    trainer_rollout: Gap
    flipped_codes: float | None = None


def gap(first: Any, second: Any, mask: Any) -> Gap:
    """Compares two [B, T] log-prob arrays where `mask` is True."""
    a, b = (np.asarray(x, np.float64)[np.asarray(mask)] for x in (first, second))
    diff = a - b
    return Gap(
        tokens=diff.size,
        equal=float(np.mean(a == b)),
        largest=float(np.abs(diff).max()),
        moved=float(np.mean(np.abs(diff) > MOVED)),
        k3=float(np.mean(np.exp(diff) - 1 - diff)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, two sides, and what is sampled."""

    params: PyTree
    config: ModelConfig
    trainer: Side
    rollout: Side
    num_prompts: int = 4
    group_size: int = 4
    width: int = 8
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=8, stop_tokens=(2,))


def published_of(setting: Setting, prompts: tuple[Any, Any]) -> Published:
    """The rollout's parameters, calibrated on the prompts where its recipe asks for it."""
    tokens, mask = (jnp.asarray(part) for part in prompts)
    side, config = setting.rollout, setting.config
    found = calibrate.first(setting.params, tokens, mask, config=config, side=side)
    return publish(setting.params, config=config, side=side, version=0, calibration=found)


def draw(published: Published, setting: Setting, side: Side, prompts: tuple[Any, Any]) -> Rollouts:
    """Rollouts of a setting; rows have different limits so that geometry matters."""
    rows = setting.num_prompts * setting.group_size
    return sample(
        published,
        *prompts,
        row_limits=np.random.default_rng(3).integers(3, setting.sampling.max_new_tokens + 1, rows, np.int32),
        keys=row_keys(jax.random.key(4), jnp.arange(rows)),
        config=setting.config,
        side=side,
        sampling=setting.sampling,
        group_size=setting.group_size,
    )


@partial(jax.jit, static_argnames=("config", "side"))
def by_blocks(published: Published, out: Rollouts, *, config: ModelConfig, side: Side) -> jax.Array:
    """[B, T] log-probs by the rollout's side: prompts, then each completion as one block over its prompt.

    The same widths as decoding (the last token is never fed back), many tokens at a time.
    """
    width, group = out.prompt_width, out.group_size
    prompts, prompt_mask = out.tokens[::group, :width], out.token_mask[::group, :width]
    prefix = models.forward(
        published.params, prompts, config=config, side=side,
        positions=models.positions_of(prompt_mask), token_mask=prompt_mask, hint=published.hint,
    )  # fmt: skip
    positions = models.positions_of(out.token_mask)
    block = models.forward(
        published.params, out.tokens[:, width:-1], config=config, side=side,
        positions=positions[:, width:-1], token_mask=out.token_mask[:, width:-1],
        prefix=prefix.kv, prefix_mask=prompt_mask, hint=published.hint,
    )  # fmt: skip
    first = jnp.repeat(prefix.hidden[:, -1:], group, axis=0)
    hidden = jnp.concatenate([first, block.hidden], axis=1)  # [B, Tc, D]
    scores = models.logits(published.params, hidden, order=side.order)
    found = logprobs.pick_logprobs(scores, out.tokens[:, width:], order=side.order)
    return jnp.pad(jnp.where(out.loss_mask[:, width:], found, 0.0), ((0, 0), (width, 0)))


def by_trainer(setting: Setting, side: Side, out: Rollouts) -> jax.Array:
    """[B, T] log-probs by teacher-forced scoring with the trainer's parameters and side."""

    return scored(
        setting.params, out, config=setting.config, side=side, temperature=setting.sampling.temperature
    )


@partial(jax.jit, static_argnames=("config", "side", "temperature"))
def scored(
    params: PyTree, out: Rollouts, *, config: ModelConfig, side: Side, temperature: float
) -> jax.Array:
    """[B, T] teacher-forced log-probs of rollouts under a master tree."""
    return models.score(
        models.fuse(params), out.tokens, out.token_mask, prompt_width=out.prompt_width,
        group_size=out.group_size, config=config, side=side, temperature=temperature, entropy="off",
        guidance=out.guidance,
    ).logprobs  # fmt: skip


def flipped_codes(setting: Setting, prompts: tuple[Any, Any]) -> float | None:
    """Share of activation codes that differ between sampling and the trainer's scoring.

    Over real tokens of prompt and completion, at sites that both sides quantize alike and whose
    rows are tokens (expert sites sort their rows, so they are left out). None if there are none.
    """
    rollout = setting.rollout.specs
    specs = {
        site: spec.act
        for site, spec in setting.trainer.specs.items
        if spec.act is not None and unguided(spec.act) == rollout[site].act and "experts" not in site
    }
    if not specs:
        return None
    published = published_of(setting, prompts)
    ours, theirs = Sink(), Sink()
    out = draw(published, setting, recording(setting.rollout, ours), prompts)
    by_trainer(setting, recording(setting.trainer, theirs), out)
    jax.effects_barrier()
    wrong = total = 0
    captured = () if rollout.capture is None else rollout.capture.sites
    for site in specs:
        twice = 2 if site in captured else 1  # quantized for the record, and by the matmul
        sampled, scored = _align(
            ours.found[site][::twice], theirs.found[site], out, setting.config.num_layers
        )
        wrong += int((sampled != scored).sum())
        total += sampled.size
    return wrong / total


def _align(
    sampled: list[np.ndarray], scored: list[np.ndarray], out: Rollouts, layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the same real tokens, layer by layer, from the two programs' own layouts."""
    width, group = out.prompt_width, out.group_size
    prompt_mask = np.asarray(out.token_mask[::group, :width])
    fed = np.asarray(out.token_mask[:, width + 1 :])  # tokens fed back: a successor was sampled
    num, cols = prompt_mask.shape[0], fed.shape[1]
    mine, other = [], []
    for layer in range(layers):
        prefill = sampled[layer].reshape(num, width, -1)
        steps = [sampled[i].reshape(len(fed), -1) for i in range(layers + layer, len(sampled), layers)]
        packed = scored[layer].reshape(num, -1, prefill.shape[-1])
        blocks = packed[:, width:].reshape(len(fed), -1, prefill.shape[-1])
        mine.append(prefill[prompt_mask])
        other.append(packed[:, :width][prompt_mask])
        for col in range(min(cols, len(steps))):
            mine.append(steps[col][fed[:, col]])
            other.append(blocks[:, col][fed[:, col]])
    return np.concatenate(mine), np.concatenate(other)


def tiny_setting(recipe: str, model: str, *, dtype: str, order: Order, kv: str | None = None) -> Setting:
    """A recipe's two sides on a tiny random model; `moe_replay` is `moe` with the rollout's experts.

    `kv` is the format of both sides' cache, or None for the recipe's own.
    """
    name = model.removesuffix(REPLAYED)
    config, replay = tiny.CONFIGS[name], "off" if name == model else "on"
    trainer, rollout = (
        dataclasses.replace(side, replay=replay)
        for side in tiny.sides(recipe, config, dtype=dtype, order=order, kv=kv)
    )
    return Setting(params=tiny.params(name), config=config, trainer=trainer, rollout=rollout)


def checkpoint_setting(loaded: Loaded, recipe: str, *, dtype: str = "bfloat16") -> Setting:
    """A recipe's two sides on a loaded model: eight sums, eight answers each."""
    trainer, rollout = tiny.sides(recipe, loaded.config, dtype=dtype)
    return Setting(
        params=loaded.params,
        config=loaded.config,
        trainer=trainer,
        rollout=rollout,
        num_prompts=8,
        group_size=8,
        sampling=SamplingConfig(
            max_new_tokens=12, stop_tokens=loaded.tokenizer.stop_ids, pad_token=loaded.tokenizer.pad_id
        ),
    )


def checkpoint_prompts(loaded: Loaded) -> tuple[np.ndarray, np.ndarray]:
    """Eight chat prompts, [8, 48] and their mask."""
    texts = [f"What is {a} + {12 - a}? Answer with the number only." for a in range(8)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return encode_prompts(loaded.tokenizer, chats, width=48)


def measure(recipe: str, model: str, *, dtype: str, order: Order, kv: str | None = None) -> Row:
    """One line of the table, on a tiny random model, flipped codes not counted."""
    setting = tiny_setting(recipe, model, dtype=dtype, order=order, kv=kv)
    return measure_setting(setting, names=(recipe, model), prompts=tiny.prompts(4))


def measure_setting(setting: Setting, *, names: tuple[str, str], prompts: tuple[Any, Any]) -> Row:
    """One line of the table for any model, pair of sides and prompts."""
    published = published_of(setting, prompts)
    verdicts = compare_checksums(
        published.checksums,
        weight_checksums(setting.params, config=setting.config, side=setting.trainer),
        rollout_side=setting.rollout,
        trainer_side=setting.trainer,
    )
    out = draw(published, setting, setting.rollout, prompts)
    blocks = by_blocks(published, out, config=setting.config, side=setting.rollout)
    return Row(
        recipe=names[0],
        model=names[1],
        kv=" / ".join(_cache_name(side) for side in (setting.trainer, setting.rollout)),
        dtype=setting.rollout.dtype,
        order=setting.rollout.order,
        weights=", ".join(sorted(set(verdicts.values()))) or "unquantized",
        prefill_decode=gap(blocks, out.rollout_logprobs, out.loss_mask),
        trainer_rollout=gap(by_trainer(setting, setting.trainer, out), out.rollout_logprobs, out.loss_mask),
    )


def _cache_name(side: Side) -> str:
    return "none" if side.kv is None else side.kv.fmt.name


def markdown(rows: list[Row]) -> str:
    """The table as markdown."""
    lines = [
        "| recipe | model | KV cache | dtype | order | weight codes | prefill = decode | trainer = rollout"
        " | flipped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        flipped = "-" if row.flipped_codes is None else f"{100 * row.flipped_codes:.3f} %"
        cells = (row.recipe, row.model, row.kv, row.dtype, row.order, row.weights)
        lines.append(
            "| " + " | ".join((*cells, f"{row.prefill_decode}", f"{row.trainer_rollout}", flipped)) + " |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Measures every recipe and prints the table; writes it where asked."""
    parser = argparse.ArgumentParser(description="parity of trainer and rollout, per recipe")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint; none: tiny random models")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--recipes", nargs="*", choices=list(tiny.RECIPES), default=list(tiny.RECIPES))
    parser.add_argument("--kv", nargs="*", default=[None], help="formats of both caches; none: the recipe's")
    parser.add_argument("--orders", nargs="*", choices=["fixed", "free"], default=["fixed", "free"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    orders: list[Order] = options.orders
    if options.checkpoint:
        loaded = interchange.load(options.checkpoint, dtype="float32")
        prompts, name = checkpoint_prompts(loaded), options.checkpoint.name
        settings = [((recipe, name), checkpoint_setting(loaded, recipe)) for recipe in options.recipes]
    else:
        prompts = tiny.prompts(4)
        settings = [
            ((recipe, model), tiny_setting(recipe, model, dtype=options.dtype, order=order, kv=kv))
            for model, order, recipe, kv in itertools.product(
                options.models, orders, options.recipes, options.kv
            )
        ]
    rows = []
    for names, setting in settings:
        row = measure_setting(setting, names=names, prompts=prompts)
        if setting.rollout.order == "free":
            row = dataclasses.replace(row, flipped_codes=flipped_codes(setting, prompts))
        rows.append(row)
        print(markdown([row]).splitlines()[-1], file=sys.stderr, flush=True)
    print(markdown(rows), end="")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
