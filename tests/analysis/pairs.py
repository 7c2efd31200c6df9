"""Both sides of a tiny model with their rollouts, and faults to plant."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models
from fp4rl_jax.arrays import PyTree
from fp4rl_jax.batch import Rollouts
from fp4rl_jax.ops.spec import MatmulSpec, Order, Side
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.rollout import Published, SamplingConfig, calibrate, publish
from tests.rollout import tiny

SMALL = {"vocab_size": 24, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
CONFIGS = {
    "dense": dataclasses.replace(tiny.DENSE, d_ff=48, **SMALL),
    "moe": dataclasses.replace(tiny.MOE, d_expert=16, **SMALL),
}
NUM, WIDTH, NEW, GROUP = 2, 6, 5, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Two sides of one model, and what the rollout's side sampled."""

    config: models.ModelConfig
    params: PyTree
    trainer: Side
    rollout: Side
    published: Published
    out: Rollouts

    @property
    def scores(self) -> jax.Array:
        """[B, T] float32, the trainer's log-probs of the rollouts."""
        return _scores(self.params, self.out, config=self.config, side=self.trainer)


def drawn(
    recipe: str,
    model: str = "dense",
    *,
    dtype: str = "float32",
    order: Order = "fixed",
    replay: Any = "off",
    plant: Callable[[Published], Published] = lambda published: published,
    change: Callable[[Side, Side], tuple[Side, Side]] = lambda trainer, rollout: (trainer, rollout),
) -> Drawn:
    """Samples from a recipe's rollout; `change` changes the sides, `plant` what publish made, before that."""
    config = CONFIGS[model]
    sides = change(*tiny.sides(recipe, config, dtype=dtype, order=order))
    trainer, rollout = (dataclasses.replace(side, replay=replay) for side in sides)
    params = models.init_params(config, jax.random.key(4))
    params = jax.tree.map(lambda w: w * 4 if w.ndim > 2 else w, params)
    prompts, mask = map(jnp.asarray, tiny.prompts(NUM, width=WIDTH, vocab=config.vocab_size))
    seen = calibrate.first(params, prompts, mask, config=config, side=rollout)
    published = plant(publish(params, config=config, side=rollout, version=0, calibration=seen))
    out = tiny.draw(
        published, prompts, mask, config=config, side=rollout, group_size=GROUP,
        row_limits=jnp.array([5, 3, 4, 5]), sampling=SamplingConfig(max_new_tokens=NEW, stop_tokens=(2,)),
    )  # fmt: skip
    return Drawn(
        config=config, params=params, trainer=trainer, rollout=rollout, published=published,
        out=jax.device_get(out),
    )  # fmt: skip


def _score(params: PyTree, out: Rollouts, *, config: models.ModelConfig, side: Side) -> jax.Array:
    return models.score(
        models.fuse(params), out.tokens, out.token_mask, prompt_width=WIDTH, group_size=GROUP, config=config,
        side=side, temperature=1.0, entropy="off", guidance=out.guidance,
    ).logprobs  # fmt: skip


_scores = jax.jit(_score, static_argnames=("config", "side"))


def changed_code(published: Published, *, site: str = "mlp/down") -> Published:
    """The published version with the sign of one weight of layer 1 flipped, where it is largest."""

    def flip(name: str, weight: Any) -> Any:
        if name != site:
            return weight
        assert isinstance(weight, QTensor)
        packed = np.array(weight.packed)
        values = np.abs(np.array(jax.vmap(lambda q: q.dequantize(jnp.float32))(weight)))[1]
        row, column = np.unravel_index(values.argmax(), values.shape)
        packed[1, row, column // 2] ^= 0x08 if column % 2 == 0 else 0x80
        return dataclasses.replace(weight, packed=jnp.asarray(packed))

    return dataclasses.replace(published, params=models.map_sites(flip, published.params))


def with_specs(side: Side, change: Callable[[MatmulSpec], MatmulSpec]) -> Side:
    """The side with every site's spec changed."""
    items = tuple((site, change(spec)) for site, spec in side.specs.items)
    return dataclasses.replace(side, specs=dataclasses.replace(side.specs, items=items))


def shifted(out: Rollouts, *names: str) -> Rollouts:
    """The rollouts whose records of those names are those of the token before."""
    guidance = {
        name: jax.tree.map(lambda leaf: np.roll(leaf, 1, axis=1), tree) if name in names else tree
        for name, tree in out.guidance.items()
    }
    return dataclasses.replace(out, guidance=guidance)
