"""Four simulated devices give what one gives: parameters by their axes, rows over data."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import models
from fp4rl_jax.parallel import MeshConfig, make_mesh, shard_batch
from tests.models.helpers import plain_side, ragged_batch
from tests.models.oracle import TINY, random_params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [("llama", MeshConfig(data=2, tensor=2)), ("qwen3_moe", MeshConfig(fsdp=2, tensor=2))],
)
def test_four_devices_equal_one(family, mesh, rng):
    config = dataclasses.replace(TINY[family], vocab_size=64)
    params = random_params(config, rng)
    tokens, mask = ragged_batch(rng, config, prompts=4, group=2, prompt_width=5, width=4)

    def loss(params, tokens, mask):
        out = models.score(
            models.fuse(params), tokens, mask, prompt_width=5, group_size=2, config=config,
            side=plain_side(config), temperature=1.0,
        )  # fmt: skip
        return jnp.sum(out.logprobs), out.logprobs

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, expected), gradient = run(params, tokens, mask)
    grid = make_mesh(mesh, devices=jax.devices()[:4])
    spread = jax.tree.map(jax.device_put, params, models.shardings(config, grid))
    rows = shard_batch({"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}, grid)
    (_, found), sharded = run(spread, rows["tokens"], rows["mask"])
    assert len(found.sharding.device_set) == 4
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    compare = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    jax.tree.map(compare, sharded, gradient)
