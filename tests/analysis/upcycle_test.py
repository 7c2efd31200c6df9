"""Upcycling: equal copies change nothing within float32, and the result is a released family's checkpoint."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import interchange, models
from fp4rl_jax.analysis import upcycle
from fp4rl_jax.cli import main
from fp4rl_jax.models import blocks
from tests.models.helpers import plain_side
from tests.models.oracle import TINY, random_params, sequence_logits

FIXTURES = Path(__file__).parents[1] / "fixtures"
U = 2.0**-24


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equal_experts_give_the_dense_models_logits(family, rng):
    """In float64 they are the same function; the float32 forward of each is tested against that oracle."""
    config = TINY[family]
    params = random_params(config, rng)
    sparse, moe = upcycle(
        jax.tree.map(jnp.asarray, params), config, jax.random.key(1), num_experts=5, num_active=3
    )
    tokens = rng.integers(0, config.vocab_size, 7)
    dense = sequence_logits(params, tokens, config)
    mixed = sequence_logits(jax.tree.map(np.asarray, sparse), tokens, moe)
    # float64 rounding of 3 gates a layer, through a network whose logits are of order 1
    np.testing.assert_allclose(mixed, dense, rtol=1e-12, atol=1e-12 * np.abs(dense).max())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_of_the_float32_forward_are_the_dense_models_within_the_derived_bound(family, rng):
    """The bound of `tests/parity` for two forwards of the same weights in any order of sums.

    A dot of length n is the exact dot of weights perturbed by n roundings (Higham, 3.1); a mixture of A equal
    experts adds 2 A + 1. So to first order a logit moves by lambda * sqrt(n + 2 A + 1) u times the root of
    the summed squares of w * d logit / d w (Higham and Mary 2019; lambda = 8 fails with probability 1e-13) on
    each side, doubled for norms and softmax, whose sums are no longer and add no weights.
    """
    config, active = TINY[family], 3
    params = jax.tree.map(jnp.asarray, random_params(config, rng))
    sparse, moe = upcycle(params, config, jax.random.key(1), num_experts=5, num_active=active)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (1, 7)), jnp.int32)

    def logits(params, config):
        fused = models.fuse(params)
        seen = jnp.ones(tokens.shape, bool)
        out = models.forward(
            fused, tokens, config=config, side=plain_side(config), token_mask=seen,
            positions=models.positions_of(seen),
        )  # fmt: skip
        return models.logits(fused, out.hidden)[0]

    def moved(dense, w):
        return jnp.sum((dense * w).reshape(*dense.shape[:2], -1).astype(jnp.float32) ** 2, axis=-1)

    dense, mixed = (
        np.asarray(jax.jit(logits, static_argnums=1)(*pair)) for pair in ((params, config), (sparse, moe))
    )
    slopes = jax.jit(jax.jacrev(logits), static_argnums=1)(params, config)
    root = np.sqrt(sum(np.asarray(part) for part in jax.tree.leaves(jax.tree.map(moved, slopes, params))))
    length = max(config.d_model, config.d_ff, tokens.shape[1]) + 2 * active + 1
    bound = 2 * 2 * 8 * np.sqrt(length) * U * root
    gap = np.abs(mixed - dense)
    print(f"{family}: largest gap {gap.max():.1e} of {np.abs(dense).max():.1f}, {bound.min():.1e} allowed")
    assert np.all(gap <= bound) and bound.max() < 1e-3 * np.abs(dense).max()


@pytest.mark.slow
def test_the_mixture_of_equal_experts_is_within_its_bound_of_the_expert(rng):
    config = dataclasses.replace(TINY["llama"], num_layers=1)
    params = jax.tree.map(jnp.asarray, random_params(config, rng))
    for active in (1, 2, 3):
        sparse, moe = upcycle(params, config, jax.random.key(2), num_experts=4, num_active=active)
        one, single = upcycle(params, config, jax.random.key(2), num_experts=1, num_active=1)
        h = jnp.asarray(rng.normal(size=(9, config.d_model)), jnp.float32)
        found, alone = (_mixture(h, tree, cfg) for tree, cfg in ((sparse, moe), (one, single)))
        # the experts' own matmuls have the same rows in other company: K roundings of the sum of magnitudes
        weights = [
            np.abs(np.asarray(one["layers"]["moe"][n][0, 0], np.float64)) for n in ("gate", "up", "down")
        ]
        inner = (np.abs(h) @ weights[0].T) * (np.abs(h) @ weights[1].T)
        matmul = 4 * (2 * config.d_model + config.d_ff) * U * (inner @ weights[2].T)
        assert np.all(np.abs(found - alone) <= (2 * active + 1) * U * np.abs(alone) + matmul)


def _mixture(h, tree, config):
    side = plain_side(config)
    layer = jax.tree.map(lambda leaf: leaf[0], models.fuse(tree)["layers"])
    calls = blocks.SiteCalls(side, key=None, hint={}, stats="off")
    found = blocks._experts(h, layer["moe"], calls, mask=jnp.ones(h.shape[0], bool), config=config)
    return np.asarray(found, np.float64)


@pytest.mark.slow
def test_noise_is_a_share_of_each_matrix_and_differs_by_expert(rng):
    config = dataclasses.replace(TINY["llama"], d_model=64, d_ff=64)
    params = jax.tree.map(jnp.asarray, random_params(config, rng))
    sparse, _ = upcycle(params, config, jax.random.key(3), num_experts=3, num_active=2, noise=0.1)
    for name in ("gate", "up", "down"):
        dense = np.asarray(params["layers"]["mlp"][name])
        added = np.asarray(sparse["layers"]["moe"][name]) - dense[:, None]
        share = added.std(axis=(2, 3)) / dense.std(axis=(1, 2))[:, None]
        # 4096 draws: the standard deviation is known to 1 / sqrt(2 * 4096) = 1.1 %; five of those
        np.testing.assert_allclose(share, 0.1, rtol=0.055)
        assert np.abs(added[:, 0] - added[:, 1]).max() > 0
        assert np.abs(np.corrcoef(added[0, 0].ravel(), added[0, 1].ravel())[0, 1]) < 5 / 64


@pytest.mark.parametrize("name, family", [("tiny_llama", "mixtral"), ("tiny_qwen3", "qwen3_moe")])
def test_the_command_writes_a_model_that_loads(name, family, tmp_path, capsys):
    target = tmp_path / "sparse"
    words = ["upcycle", str(FIXTURES / name), str(target), "--experts=4", "--active=2", "--dtype=float32"]
    assert main(words) == 0
    assert "4 experts, 2 active" in capsys.readouterr().out
    dense, sparse = (interchange.load(path, dtype="float32") for path in (FIXTURES / name, target))
    assert (sparse.config.family, sparse.config.num_experts, sparse.config.d_expert) == (
        family,
        4,
        dense.config.d_ff,
    )
    assert sparse.config.norm_topk
    for part in ("gate", "up", "down"):
        copies = np.asarray(sparse.params["layers"]["moe"][part])
        for expert in range(4):
            np.testing.assert_array_equal(copies[:, expert], dense.params["layers"]["mlp"][part])
    assert main(words) == 2 and "exists" in capsys.readouterr().err


def test_what_cannot_be_upcycled_is_refused():
    key = jax.random.key(0)
    for config, change, message in (
        (TINY["qwen2"], {}, "family 'qwen2' cannot be upcycled"),
        (TINY["qwen3_moe"], {}, "has 5 experts already"),
        (TINY["llama"], {"noise": -1.0}, "noise is -1.0"),
        (TINY["llama"], {"num_experts": 0}, "num_experts is 0, expected at least 1"),
        (TINY["llama"], {"num_active": 9}, r"num_active must be in 1..4, got 9"),
    ):
        numbers = {"num_experts": 4, "num_active": 2, **change}
        with pytest.raises(ValueError, match=message):
            upcycle(models.abstract_params(config), config, key, **numbers)
