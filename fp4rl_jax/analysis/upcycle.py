"""Sparse upcycling (arXiv 2212.05055): a dense model becomes a mixture of experts that starts as good.

Every feed-forward layer is copied into E experts, with normalised top-k gates and a fresh router. While the
copies are equal a token's output does not depend on which experts it takes, because its gates sum to 1: in
float32, with u = 2^-24 and A active experts, an element of the mixture differs from its experts' common value
by at most a share (2 A + 1) u (A roundings in the sum of the gates, one in each quotient, one in each
product, A - 1 in the sum), beside what a matmul of other shape accumulates in another order.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array, PyTree
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.models.config import Family

#: The released family with experts that has a dense family's attention.
SPARSE: dict[str, Family] = {"llama": "mixtral", "qwen3": "qwen3_moe"}
ROUTER_STD = 0.02


def upcycle(
    params: PyTree, config: ModelConfig, key: Array, *, num_experts: int, num_active: int, noise: float = 0.0
) -> tuple[PyTree, ModelConfig]:
    """Makes a mixture of experts of a dense model.

    Args:
        params: master tree of `config`.
        config: a dense model of family llama or qwen3.
        key: typed PRNG key, of the router and the noise.
        num_experts, num_active: E and A.
        noise: standard deviation of what is added to every expert's matrices, as a share of the matrix's
            own standard deviation in its layer; 0 leaves them equal.

    Returns:
        The master tree of the mixture, leaves in the dtype they came in, and its configuration.

    Raises:
        ValueError: the model has experts already, no released family can express the mixture, or a number
            is out of range.
    """
    if config.num_experts:
        raise ValueError(f"the model has {config.num_experts} experts already")
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}, expected at least 1")
    if config.family not in SPARSE:
        raise ValueError(
            f"family {config.family!r} cannot be upcycled: no released mixture has its attention "
            f"(expected one of {', '.join(sorted(SPARSE))})"
        )
    if not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise is {noise}, expected a finite number of at least 0")
    sparse = dataclasses.replace(
        config,
        family=SPARSE[config.family],
        num_experts=num_experts,
        num_active=num_active,
        d_expert=config.d_ff,
        d_ff=0,
    )
    layers = dict(params["layers"])
    mlp = layers.pop("mlp")
    router_key, *keys = jax.random.split(key, 1 + len(mlp))
    moe = {
        name: _copies(w, k, num_experts=num_experts, noise=noise)
        for (name, w), k in zip(sorted(mlp.items()), keys, strict=True)
    }
    shape = (config.num_layers, num_experts, config.d_model)
    router = ROUTER_STD * jax.random.normal(router_key, shape, jnp.float32)
    moe["router"] = router.astype(mlp["gate"].dtype)
    return {**params, "layers": {**layers, "moe": moe}}, sparse


def _copies(weight: Array, key: Array, *, num_experts: int, noise: float) -> Array:
    """[L, N, K] to [L, E, N, K]: copies, each with noise of its own."""
    copies = jnp.repeat(weight[:, None], num_experts, axis=1)
    if noise == 0:
        return copies
    wide = weight.astype(jnp.float32)
    spread = noise * jnp.std(wide, axis=(1, 2), keepdims=True)[:, None]

    def one(index: Array) -> Array:
        layer = wide[index]
        drawn = jax.random.normal(jax.random.fold_in(key, index), (num_experts, *layer.shape), jnp.float32)
        return (layer[None] + spread[index] * drawn).astype(weight.dtype)

    return jax.lax.map(one, jnp.arange(weight.shape[0]))
