"""Fixed order: a row's bits depend on the row alone, not on how many rows there are or which."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.quantizers import Quantizer

W4A4 = ops.MatmulSpec(
    weight=Quantizer(formats.make("nvfp4", outer="tensor")),
    act=Quantizer(formats.make("nvfp4", outer="row")),
)
#: Numbers of rows: one, around vector widths and row tiles, and beyond 64.
COUNTS = (1, 2, 7, 16, 17, 33, 69)


def assert_rows_stand_alone(fn, x: jax.Array, counts: Iterable[int] = COUNTS) -> None:
    """`fn` of the first and of the last m rows equals those rows of the whole, bit for bit."""
    whole = np.asarray(fn(x), np.float32)
    rows = x.shape[0]
    for m in counts:
        np.testing.assert_array_equal(np.asarray(fn(x[:m]), np.float32), whole[:m], err_msg=f"first {m}")
        tail = np.asarray(fn(x[rows - m :]), np.float32)
        np.testing.assert_array_equal(tail, whole[rows - m :], err_msg=f"last {m}")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((960, 576), jnp.float32),
        ((33, 48), jnp.float32),
        pytest.param((576, 1536), jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param((576, 1536), jnp.float32, marks=pytest.mark.slow),
        pytest.param((960, 576), jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param((33, 48), jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_matmul(shape: tuple[int, int], dtype, rng: np.random.Generator) -> None:
    n, k = shape
    x = jnp.asarray(rng.normal(size=(70, k)), dtype)
    w = ops.prepare_weight(jnp.asarray(rng.normal(size=(n, k)), dtype))
    assert_rows_stand_alone(jax.jit(lambda x: ops.matmul(x, w, order="fixed")), x)


def test_eager_and_jit_agree(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(5, 576)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(40, 576)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=576), jnp.float32)
    for fn in (
        lambda x: ops.matmul(x, w, order="fixed"),
        lambda x: ops.rms_norm(x, scale, eps=1e-5, order="fixed"),
        lambda x: ops.pointwise(jax.nn.silu, x, order="fixed"),
    ):
        np.testing.assert_array_equal(np.asarray(fn(x)), np.asarray(jax.jit(fn)(x)))


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (576, jnp.float32),
        (48, jnp.bfloat16),
        pytest.param(48, jnp.float32, marks=pytest.mark.slow),
        pytest.param(576, jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_rms_norm(width: int, dtype, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(70, width)) * 3, dtype)
    w = jnp.asarray(rng.normal(size=width), jnp.float32)
    assert_rows_stand_alone(jax.jit(lambda x: ops.rms_norm(x, w, eps=1e-5, order="fixed")), x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_few_rows_and_rows_around_multiples_of_16(dtype, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(70, 576)), dtype)
    w = ops.prepare_weight(jnp.asarray(rng.normal(size=(100, 576)), dtype))
    scale = jnp.asarray(rng.normal(size=576), jnp.float32)

    @jax.jit
    def both(x):
        return ops.matmul(ops.rms_norm(x, scale, eps=1e-5, order="fixed"), w, order="fixed")

    around = [16 * i + d for i in range(1, 5) for d in (-1, 0, 1)]
    assert_rows_stand_alone(both, x, counts=(*range(1, 10), *around, 70))


def test_pointwise(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(70, 3)) * 5, jnp.float32)
    for fn in (jnp.exp, jax.nn.silu, jnp.cos):
        assert_rows_stand_alone(jax.jit(lambda x, fn=fn: ops.pointwise(fn, x, order="fixed")), x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_grouped_matmul_equals_matmul_of_each_expert(dtype, rng: np.random.Generator) -> None:
    """A token's result does not depend on which other tokens its expert got."""
    x = jnp.asarray(rng.normal(size=(9, 48)), dtype)
    w = jnp.asarray(rng.normal(size=(3, 20, 48)), dtype)
    sizes = jnp.array([4, 0, 5], jnp.int32)
    y = jax.jit(lambda x: ops.grouped_matmul(x, w, sizes, order="fixed"))(x)
    alone = jax.jit(lambda x, w: ops.matmul(x, w, order="fixed"))
    for row, expert in enumerate([0] * 4 + [2] * 5):
        expected = alone(x[row : row + 1], w[expert])[0]
        np.testing.assert_array_equal(np.asarray(y[row], np.float32), np.asarray(expected, np.float32))


def attention_case(rng: np.random.Generator, dtype, *, b: int, p: int, t: int, heads=(6, 2), c: int = 16):
    """Queries over a prompt shared by groups and a causal completion of their own."""
    h, kv = heads
    q = jnp.asarray(rng.normal(size=(b, t, h, c)), dtype)
    prompt, own = (
        tuple(jnp.asarray(rng.normal(size=(batch, kv, s, c)), dtype) for _ in range(2))
        for batch, s in ((p, 11), (b, t))
    )
    seen = jnp.asarray(rng.random((b, t, 11)) < 0.8)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
    return q, (ops.Segment(*prompt, seen), ops.Segment(*own, causal))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_of_one_token_equals_its_column_of_a_block(dtype, rng: np.random.Generator) -> None:
    """Decode (T = 1) equals scoring (T = Tc); one row equals that row among many."""
    q, segments = attention_case(rng, dtype, b=6, p=3, t=5)

    @jax.jit
    def attend(q, segments):
        return ops.attention(q, segments=segments, scale=0.25, order="fixed")

    whole = np.asarray(attend(q, segments), np.float32)
    for t in range(5):
        step = tuple(s._replace(mask=s.mask[:, t : t + 1]) for s in segments)
        one = np.asarray(attend(q[:, t : t + 1], step), np.float32)
        np.testing.assert_array_equal(one[:, 0], whole[:, t])
    for row in (0, 3, 5):
        prompt, own = segments
        k, v = (a[row // 2 : row // 2 + 1] for a in prompt[:2])
        alone = (
            ops.Segment(k, v, prompt.mask[row : row + 1]),
            ops.Segment(own.k[row : row + 1], own.v[row : row + 1], own.mask[row : row + 1]),
        )
        np.testing.assert_array_equal(np.asarray(attend(q[row : row + 1], alone), np.float32)[0], whole[row])


def block(x: jax.Array, weights, *, remat: bool) -> jax.Array:
    """Two layers of norm, quantized matmul, gate and residual, scanned, in the fixed order."""

    def layer(x, w):
        up, down, scale = w
        h = ops.rms_norm(x, scale, eps=1e-5, order="fixed")
        h = ops.pointwise(jax.nn.silu, ops.matmul(h, up, W4A4, order="fixed"), order="fixed")
        return x + ops.matmul(h, down, W4A4, order="fixed"), None

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)[0]


def block_weights(rng: np.random.Generator):
    shapes = ((2, 96, 48), (2, 48, 96), (2, 48))
    return tuple(jnp.asarray(rng.normal(size=s) * 0.2, jnp.float32) for s in shapes)


@pytest.mark.slow
def test_a_stack_of_layers_stands_alone_by_row_and_under_remat(rng: np.random.Generator) -> None:
    """The surrounding program (jit, scan, checkpoint, gradient) does not reach a row's bits."""
    weights = block_weights(rng)
    x = jnp.asarray(rng.normal(size=(20, 48)), jnp.bfloat16)
    plain = jax.jit(lambda x: block(x, weights, remat=False))
    assert_rows_stand_alone(plain, x, counts=(1, 7))
    remat = jax.jit(lambda x: block(x, weights, remat=True))
    np.testing.assert_array_equal(np.asarray(remat(x), np.float32), np.asarray(plain(x), np.float32))

    @jax.jit
    def with_gradient(x):
        def loss(x):
            y = block(x, weights, remat=True)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), dx = jax.value_and_grad(loss, has_aux=True)(x)
        return y, dx

    y, dx = with_gradient(x)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(plain(x), np.float32))
    assert np.all(np.isfinite(np.asarray(dx, np.float32)))
