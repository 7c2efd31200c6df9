"""The operations on one NVIDIA GPU: what is claimed to be float32, exact or native is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.ops import attention_cudnn
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.quantizers import Quantizer
from pallas_kernels import matmul
from pallas_kernels.dispatch import Facts
from pallas_kernels.testing import accumulation_bound

pytestmark = pytest.mark.gpu

W4A4 = ops.MatmulSpec(
    weight=Quantizer(formats.make("nvfp4")), act=Quantizer(formats.make("nvfp4", outer="row"))
)


def inputs(rng: np.random.Generator, dtype) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(rng.normal(size=(64, 576)), dtype)
    return x, jnp.asarray(rng.normal(size=(960, 576)) * 0.05, jnp.float32)


def test_float32_matmuls_are_not_tf32(rng: np.random.Generator) -> None:
    x, w = inputs(rng, jnp.float32)
    y = np.asarray(jax.jit(ops.matmul)(x, w), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.all(np.abs(y - exact) <= accumulation_bound(x, w))


def test_the_emulated_product_is_exact_and_in_bfloat16(rng: np.random.Generator) -> None:
    x, w = inputs(rng, jnp.bfloat16)
    q = ops.quantize_weight(w, W4A4.weight)
    assert ops.prepare(q).operand.dtype == jnp.bfloat16

    @jax.jit
    def three(x, w, q):
        return [ops.matmul(x, v, W4A4, out_dtype=jnp.float32) for v in (w, q, ops.prepare(q))]

    by_array, by_codes, by_operand = (np.asarray(y) for y in three(x, w, q))
    np.testing.assert_array_equal(by_array, by_codes)
    np.testing.assert_array_equal(by_array, by_operand)
    x_q, w_q = W4A4.act.quantize(x).dequantize(), q.dequantize()
    exact = np.asarray(x_q, np.float64) @ np.asarray(w_q, np.float64).T
    assert np.all(np.abs(by_array - exact) <= accumulation_bound(x_q, w_q))
    plain = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.abs(by_array - plain).max() > 100 * np.abs(by_array - exact).max()  # it did quantize


def test_rounding_is_not_skipped_inside_a_program(rng: np.random.Generator) -> None:
    """A bfloat16 result that is widened at once is still a bfloat16 value."""
    x, w = inputs(rng, jnp.bfloat16)
    wide = jax.jit(lambda x, w: ops.matmul(x, w).astype(jnp.float32))(x, w)
    np.testing.assert_array_equal(np.asarray(wide), np.asarray(wide.astype(jnp.bfloat16).astype(jnp.float32)))


@pytest.mark.parametrize("span", ["any", "causal"])
def test_fused_attention_is_that_of_the_dots(span, rng: np.random.Generator) -> None:
    """A block after a shared prompt, with queries that see nothing: values and gradients, to bfloat16.

    Two roundings to 8 bits, as the dots have them, and those of the fused kernel's own probabilities.
    """
    b, p, t, s, heads, c = 6, 3, 33, 21, (6, 2), 64
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    q, seen = draw(b, t, heads[0], c), jnp.asarray(rng.random((b, t, s)) < 0.7).at[2, 5].set(False)
    own = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t)).at[2, 5].set(False)
    keys = (
        draw(p, heads[1], s, c),
        draw(p, heads[1], s, c),
        draw(b, heads[1], t, c),
        draw(b, heads[1], t, c),
    )

    def attend(q, k, v, own_k, own_v):
        segments = (ops.Segment(k, v, seen), ops.Segment(own_k, own_v, own))
        return ops.attention(q, segments=segments, scale=c**-0.5, span=span)

    def run(*operands):
        with_slope = lambda *xs: (jnp.sum(jnp.sin(attend(*xs).astype(jnp.float32))), attend(*xs))  # noqa: E731
        (_, out), slopes = jax.value_and_grad(with_slope, argnums=range(5), has_aux=True)(*operands)
        return out, *slopes

    assert attention_cudnn.refusal(q, (ops.Segment(*keys[2:], own),), machines.current()) is None
    fused = jax.jit(run)(q, *keys)
    wide = jax.jit(run)(*(x.astype(jnp.float32) for x in (q, *keys)))  # refused: through the dots
    assert not np.any(np.asarray(fused[0][2, 5], np.float32))
    for got, want in zip(fused, wide, strict=True):
        limit = 2.0**-8 * (4 * np.abs(np.asarray(want)).max() + np.abs(np.asarray(want)))
        assert np.all(np.abs(np.asarray(got, np.float64) - np.asarray(want)) <= limit)


FP8 = Quantizer(formats.make("fp8_e4m3"))


def test_float8_sites_run_natively(rng: np.random.Generator) -> None:
    """FP8 goes to the tensor cores as it is; the accumulator holds 13 bits below the magnitudes."""
    machine = machines.current()
    if machine.capability is None or machine.capability < (8, 9):
        pytest.skip(f"no FP8 tensor cores at compute capability {machine.capability}")
    spec = ops.MatmulSpec(weight=FP8, act=FP8)
    x, w = inputs(rng, jnp.bfloat16)
    q = ops.quantize_weight(w, FP8)
    prepared = ops.prepare(q)
    assert prepared.operand.dtype == jnp.float8_e4m3fn

    def call(x, w):
        return ops.matmul(x, w, spec, out_dtype=jnp.float32)

    by_array, by_operand = (np.asarray(jax.jit(call)(x, v)) for v in (w, prepared))
    np.testing.assert_array_equal(by_array, by_operand)
    x_q, w_q = (np.asarray(v.dequantize(), np.float64) for v in (FP8.quantize(x), q))
    assert np.all(np.abs(by_array - x_q @ w_q.T) <= 2.0**-13 * (np.abs(x_q) @ np.abs(w_q).T))


@pytest.mark.parametrize("shape", [(64, 960, 576), (1024, 2048, 4096)])
def test_the_float8_dot_is_not_widened(shape: tuple[int, int, int]) -> None:
    """The compiled program multiplies float8 operands: through cuBLAS, or in a fused dot."""
    m, n, k = shape
    facts = Facts(
        platform="gpu",
        capability=machines.current().capability,
        m=m,
        n=n,
        k=k,
        x_dtype=matmul.FP8,
        w_dtype=matmul.FP8,
    )
    x, w = (jax.ShapeDtypeStruct((rows, k), jnp.float8_e4m3fn) for rows in (m, n))
    run = jax.jit(lambda x, w: matmul.matmul(x, w, facts=facts, impl="xla_fp8"))
    text = run.lower(x, w).compile().as_text() or ""
    lines = [line.strip() for line in text.splitlines() if " dot(" in line or " convert(" in line]
    assert "__cublas$lt$matmul$f8" in text or (" dot(" in text and " convert(" not in text), lines


def test_attention_and_norm_in_float32(rng: np.random.Generator) -> None:
    q = jnp.asarray(rng.normal(size=(2, 3, 4, 64)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 3, 2, 64)), jnp.float32) for _ in range(2))
    mask = jnp.ones((2, 3, 3), bool)
    out = jax.jit(lambda: ops.attention(q, k, v, mask, scale=0.125))()
    keys, values = (np.repeat(np.asarray(a, np.float64), 2, axis=2) for a in (k, v))
    scores = np.exp(np.einsum("bthc,bshc->bhts", np.asarray(q, np.float64), keys) * 0.125)
    scores /= scores.sum(axis=-1, keepdims=True)
    expected = np.einsum("bhts,bshc->bthc", scores, values)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=0, atol=2e-6)
