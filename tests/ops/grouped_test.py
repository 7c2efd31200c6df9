"""The experts' matmul equals the plain one of each expert, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.quantizers import Quantizer

ROW = Quantizer(formats.make("nvfp4", outer="row"))
FP8 = Quantizer(formats.make("fp8_e4m3"))
SPECS = {
    "plain": ops.MatmulSpec(),
    "w4a4": ops.MatmulSpec(weight=Quantizer(formats.make("nvfp4")), act=ROW),
    "fp8": ops.MatmulSpec(
        weight=Quantizer(formats.make("fp8_e4m3")), act=Quantizer(formats.make("fp8_e4m3"))
    ),
    "reused": ops.MatmulSpec(weight=Quantizer(formats.make("nvfp4")), act=ROW, grad=ROW, backward="reused"),
}
SIZES = (16, 0, 32)  # whole blocks of 16 rows an expert: no wgrad block spans two


def case(rng: np.random.Generator):
    x = jnp.asarray(rng.normal(size=(48, 32)), jnp.float32)
    magnitudes = np.array([1, 30, 0.01])[:, None, None]
    w = jnp.asarray(rng.normal(size=(3, 20, 32)) * magnitudes, jnp.float32)
    return x, w, jnp.asarray(SIZES, jnp.int32)


def by_expert(x, w, spec: ops.MatmulSpec) -> jax.Array:
    ends = np.cumsum(SIZES)
    parts = [
        ops.matmul(x[e - n : e], w[i], spec) for i, (e, n) in enumerate(zip(ends, SIZES, strict=True)) if n
    ]
    return jnp.concatenate(parts)


@pytest.mark.fast_cases("plain", "reused")
@pytest.mark.parametrize("name", SPECS)
def test_forward_and_gradients(name: str, rng: np.random.Generator) -> None:
    spec, (x, w, sizes) = SPECS[name], case(rng)
    dy = jnp.asarray(rng.normal(size=(48, 20)), jnp.float32)

    @jax.jit
    def both(x, w):
        grouped, pull = jax.vjp(lambda x, w: ops.grouped_matmul(x, w, sizes, spec), x, w)
        single, pull_single = jax.vjp(lambda x, w: by_expert(x, w, spec), x, w)
        return (grouped, *pull(dy)), (single, *pull_single(dy))

    for got, expected in zip(*both(x, w), strict=True):
        scale = np.abs(np.asarray(expected)).max()
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-4, atol=1e-6 * scale)


def test_published_experts_give_the_same_bits_and_no_gradient(rng: np.random.Generator) -> None:
    spec, (x, w, sizes) = SPECS["w4a4"], case(rng)
    q = ops.quantize_weight(w, spec.weight)

    @jax.jit
    def three(x, w, q):
        return [ops.grouped_matmul(x, v, sizes, spec) for v in (w, q, ops.prepare(q))]

    first, *others = (np.asarray(y) for y in three(x, w, q))
    for other in others:
        np.testing.assert_array_equal(first, other)
    dx = jax.grad(lambda x: jnp.sum(ops.grouped_matmul(x, q, sizes, spec) ** 2))(x)
    assert np.abs(np.asarray(dx)).max() > 0


def test_rows_beyond_the_groups_give_zeros(rng: np.random.Generator) -> None:
    x, w, _ = case(rng)
    for order in ("free", "fixed"):
        y = ops.grouped_matmul(x, w, jnp.array([5, 4, 0], jnp.int32), order=order)
        assert np.all(np.asarray(y)[9:] == 0)
        assert np.all(np.any(np.asarray(y)[:9] != 0, axis=1))
