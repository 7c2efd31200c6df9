"""Tiny random models and the sides of every recipe, shared by the tests of the sampler and of parity."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from fp4rl_jax import models, plugins, recipes
from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.ops.spec import Order, Side, SideSpec
from fp4rl_jax.rollout import SamplingConfig, calibrate, publish, row_keys, sample
from fp4rl_jax.rollout.publish import Frozen, Published

DENSE = models.ModelConfig(vocab_size=96, num_layers=2, d_model=64, d_ff=96, max_length=128)
MOE = models.ModelConfig(
    family="qwen3_moe", vocab_size=96, num_layers=2, d_model=64, num_experts=4, num_active=2, d_expert=32,
    qk_norm=True, max_length=128,
)  # fmt: skip
CONFIGS = {"dense": DENSE, "moe": MOE}

RECIPES = plugins.names(recipes)


@cache
def params(name: str) -> PyTree:
    """Random masters with a spread that makes the next token far from uniform."""
    tree = models.init_params(CONFIGS[name], jax.random.key(11))
    return jax.tree.map(lambda w: w * 4 if w.ndim > 1 and w.shape[-1] > 16 else w, tree)


def sides(
    recipe: str,
    config: models.ModelConfig,
    *,
    dtype: str = "float32",
    order: Order = "free",
    kv: str | None = None,
) -> tuple[Side, Side]:
    """(trainer, rollout) sides of a recipe with its own defaults, or with another format of the KV cache."""
    module = plugins.load(recipes, recipe)
    settings = module.Config(**({} if kv is None else {"kv": kv}))
    specs: tuple[SideSpec, SideSpec] = (module.trainer(settings), module.rollout(settings))
    found = models.sites(config)
    trainer, rollout = (
        Side(specs=spec.resolve(found), dtype=dtype, order=order, kv=spec.kv) for spec in specs
    )
    return trainer, rollout


def prompts(num: int, *, width: int = 8, vocab: int = 96, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded prompts of different lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, width + 1, num)
    mask = np.arange(width)[None] >= width - lengths[:, None]
    return np.where(mask, rng.integers(3, vocab, (num, width)), 0).astype(np.int32), mask


def published(
    tree: PyTree, *, config: models.ModelConfig, side: Side, version: int = 0, frozen: Frozen | None = None
) -> Published:
    """`publish`; where the side asks for a calibration, one of inputs whose channels are all alike."""
    calibration = jax.tree.map(jnp.ones_like, calibrate.empty(config, side))
    return publish(tree, config=config, side=side, version=version, calibration=calibration, frozen=frozen)


def draw(published: Published, tokens: Array, mask: Array, **options):
    """`sample` with defaults that suit tiny models; options override them."""
    group = options.get("group_size", 1)
    rows = tokens.shape[0] * group
    defaults = {
        "row_limits": jnp.full(rows, 6, jnp.int32),
        "keys": row_keys(jax.random.key(5), jnp.arange(rows)),
        "sampling": SamplingConfig(max_new_tokens=6, stop_tokens=(2,), pad_token=0),
    }
    return sample(published, tokens, mask, **{**defaults, **options})
