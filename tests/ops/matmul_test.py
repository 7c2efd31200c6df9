"""The quantized matmul: its operands, its exactness, its gradients in every backward mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.ops import machine as machines
from fp4rl_jax.ops.operands import Prepared
from fp4rl_jax.quantizers import Guided, Quantizer, Stochastic

ROW = Quantizer(formats.make("nvfp4", outer="row"))
TENSOR = Quantizer(formats.make("nvfp4", outer="tensor"))
W4A4 = ops.MatmulSpec(weight=TENSOR, act=ROW)

PAIRS = {
    "nvfp4": (TENSOR, ROW),
    "nvfp4_fp32": tuple(
        Quantizer(formats.make("nvfp4", outer=span, outer_rounding="fp32")) for span in ("tensor", "row")
    ),
    "mxfp4": (Quantizer(formats.make("mxfp4")),) * 2,
    "hif4": (Quantizer(formats.make("hif4")),) * 2,
    "fp8": (Quantizer(formats.make("fp8_e4m3")),) * 2,
    "fp8_blocks": (Quantizer(formats.make("fp8_e4m3", block_size=128)),) * 2,
    "weight_only": (TENSOR, None),
    "plain": (None, None),
}


def spec_of(pair: str) -> ops.MatmulSpec:
    weight, act = PAIRS[pair]
    return ops.MatmulSpec(weight=weight, act=act)


def inputs(rng: np.random.Generator, dtype=jnp.float32, *, m: int = 6, n: int = 24, k: int = 144):
    x = jnp.asarray(rng.normal(size=(2, m // 2, k)) * 3, dtype)
    w = jnp.asarray(rng.normal(size=(n, k)) * 0.05, jnp.float32)
    return x, w


def values(quantizer: Quantizer | None, x: jax.Array) -> np.ndarray:
    """What the operand stands for, in float64."""
    q = x if quantizer is None else quantizer.quantize(x).dequantize()
    return np.asarray(q, np.float64)


@pytest.mark.fast_cases("nvfp4_fp32-float32", "fp8_blocks-float32", "plain-float32", "weight_only-bfloat16")
@pytest.mark.parametrize(
    ("pair", "dtype"),
    [
        *((pair, jnp.float32) for pair in ("nvfp4_fp32", "mxfp4", "hif4", "fp8", "fp8_blocks", "plain")),
        *((pair, jnp.bfloat16) for pair in ("nvfp4", "weight_only", "plain")),
    ],
)
def test_product_of_the_quantized_operands(pair: str, dtype, rng: np.random.Generator) -> None:
    """Equals the float64 product within the float32 accumulator's bound."""
    x, w = inputs(rng, dtype)
    spec = spec_of(pair)
    y = jax.jit(lambda x, w: ops.matmul(x, w, spec, out_dtype=jnp.float32))(x, w)
    x_q = values(spec.act, x)
    w_q = values(spec.weight, w if spec.weight else w.astype(dtype))
    exact = x_q @ w_q.T
    bound = (x.shape[-1] + 3) * 2.0**-24 * (np.abs(x_q) @ np.abs(w_q).T)
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= bound)


@pytest.mark.fast_cases("nvfp4-free", "fp8-fixed")
@pytest.mark.parametrize("order", ["free", "fixed"])
@pytest.mark.parametrize("pair", ["nvfp4", "fp8", "fp8_blocks"])
def test_published_and_prepared_weights_give_the_same_bits(
    pair: str, order: str, rng: np.random.Generator
) -> None:
    x, w = inputs(rng, jnp.bfloat16)
    spec = spec_of(pair)

    @jax.jit
    def three(x, w, q):
        return [ops.matmul(x, v, spec, order=order) for v in (w, q, ops.prepare(q))]

    q = ops.quantize_weight(w, spec.weight)
    by_array, by_codes, by_operand = (np.asarray(y, np.float32) for y in three(x, w, q))
    np.testing.assert_array_equal(by_array, by_codes)
    np.testing.assert_array_equal(by_array, by_operand)


def test_stacked_weights_pass_through_prepare_and_scan(rng: np.random.Generator) -> None:
    """Every matrix of a stack has its own outer scale; scan sees the matrices one by one."""
    x, _ = inputs(rng, jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(3, 24, 144)) * np.array([1, 100, 0.01])[:, None, None], jnp.float32)
    q = ops.quantize_weight(w, TENSOR)
    assert q.shape == (3, 24, 144)
    assert q.outer_scale is not None
    assert q.outer_scale.shape == (3,)
    assert len(np.unique(np.asarray(q.outer_scale))) == 3

    def layer(_, part):
        return None, ops.matmul(x, part, W4A4)

    by_scan = jax.jit(lambda q: jax.lax.scan(layer, None, ops.prepare(q))[1])(q)
    one_by_one = jax.jit(lambda w: jnp.stack([ops.matmul(x, part, W4A4) for part in w]))(w)
    np.testing.assert_array_equal(np.asarray(by_scan, np.float32), np.asarray(one_by_one, np.float32))


def test_float32_and_bfloat16_operands_give_the_same_products(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype of exactly decoded operands is a matter of speed: only the sum's order differs."""
    x, w = inputs(rng, jnp.bfloat16)
    found = []
    for narrow in ("float32", "bfloat16"):
        machine = machines.Machine(platform="cpu", narrow=narrow)
        monkeypatch.setattr(machines, "current", lambda machine=machine: machine)
        prepared = ops.prepare_weight(ops.quantize_weight(w, TENSOR))
        assert prepared.operand.dtype == jnp.dtype(narrow)
        found.append(np.asarray(ops.matmul(x, prepared, W4A4, out_dtype=jnp.float32), np.float64))
    x_q, w_q = values(ROW, x), values(TENSOR, w)
    bound = 2 * (x.shape[-1] + 3) * 2.0**-24 * (np.abs(x_q) @ np.abs(w_q).T)
    assert np.all(np.abs(found[0] - found[1]) <= bound)


def straight_line(spec: ops.MatmulSpec, x: np.ndarray, w: np.ndarray, dy: np.ndarray):
    """dx and dw of one mode written out in float64 with nothing but quantize and dequantize."""

    def quantized(quantizer: Quantizer | None, a: np.ndarray) -> np.ndarray:
        return values(quantizer, jnp.asarray(a, jnp.float32))

    x_fwd, w_fwd = quantized(spec.act, x), quantized(spec.weight, w)
    match spec.backward:
        case "dequantized":
            return dy @ w_fwd, dy.T @ x_fwd
        case "high_precision":
            return dy @ w, dy.T @ x
        case "reused":
            return quantized(spec.grad, dy) @ w_fwd, quantized(spec.grad, dy.T) @ x_fwd
        case "requantized":
            return (
                quantized(spec.grad, dy) @ quantized(spec.weight, w.T).T,
                quantized(spec.grad, dy.T) @ quantized(spec.act, x.T).T,
            )


@pytest.mark.fast_cases("nvfp4-requantized", "fp8-dequantized")
@pytest.mark.parametrize(
    ("pair", "backward"),
    [
        *(("nvfp4", mode) for mode in ("dequantized", "high_precision", "requantized", "reused")),
        ("fp8", "dequantized"),
        ("fp8", "reused"),
    ],
)
def test_gradients_equal_a_straight_line_form(pair: str, backward, rng: np.random.Generator) -> None:
    weight, act = PAIRS[pair]
    grad = act if backward in ("requantized", "reused") else None
    spec = ops.MatmulSpec(weight=weight, act=act, grad=grad, backward=backward)
    x, w = inputs(rng)
    dy = jnp.asarray(rng.normal(size=(2, 3, 24)), jnp.float32)
    _, vjp = jax.vjp(jax.jit(lambda x, w: ops.matmul(x, w, spec)), x, w)
    dx, dw = vjp(dy)
    x2, w2, dy2 = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, w, dy))
    expected_dx, expected_dw = straight_line(spec, x2, w2, dy2)
    np.testing.assert_allclose(np.asarray(dx).reshape(6, -1), expected_dx, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(np.asarray(dw), expected_dw, rtol=2e-5, atol=2e-5)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)


def test_gradients_of_the_plain_product_are_the_usual_ones(rng: np.random.Generator) -> None:
    x, w = inputs(rng)
    ours = jax.grad(lambda x, w: jnp.sum(jnp.sin(ops.matmul(x, w))), argnums=(0, 1))(x, w)
    usual = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), argnums=(0, 1))(x, w)
    for a, b in zip(ours, usual, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_a_published_weight_passes_its_gradient_to_x_alone(rng: np.random.Generator) -> None:
    x, w = inputs(rng)
    q = ops.quantize_weight(w, TENSOR)
    loss = jax.jit(jax.grad(lambda x, w: jnp.sum(ops.matmul(x, w, W4A4) ** 2)))
    np.testing.assert_array_equal(np.asarray(loss(x, q)), np.asarray(loss(x, w)))


def test_a_stochastic_gradient_is_keyed_and_unbiased(key: jax.Array, rng: np.random.Generator) -> None:
    """The key is a leaf of the vjp: equal keys, equal gradients; the mean tends to the exact one."""
    up = Quantizer(formats.make("nvfp4", outer="row", scale_rounding="up"), Stochastic())
    spec = ops.MatmulSpec(grad=up, backward="reused")
    x, w = inputs(rng, m=4, n=16, k=16)
    dy = jnp.asarray(rng.normal(size=(2, 2, 16)), jnp.float32)

    @jax.jit
    @jax.vmap
    def dw(k):
        return jax.vjp(lambda w: ops.matmul(x, w, spec, key=k), w)[1](dy)[0]

    keys = jax.random.split(key, 400)
    draws = np.asarray(dw(keys))
    np.testing.assert_array_equal(draws, np.asarray(dw(keys)))
    assert np.any(draws[0] != draws[1])
    exact = np.einsum("btn,btk->nk", np.asarray(dy, np.float64), np.asarray(x, np.float64))
    error = np.abs(draws.mean(axis=0) - exact)
    spread = draws.std(axis=0) / np.sqrt(len(keys))
    assert np.all(error <= 5.2 * spread + 1e-6)  # 5.2 sigma: Bonferroni over 256 values at 5e-5


@pytest.mark.parametrize("backward", ["dequantized", "requantized"])
def test_a_hint_reaches_the_activation_quantizer(backward, rng: np.random.Generator) -> None:
    """With the rollout's codes as the hint, a slightly different x gives the rollout's product."""
    x, w = inputs(rng, m=2, n=16, k=32)
    near = x * (1 + 1e-4 * jnp.asarray(rng.normal(size=x.shape), jnp.float32))
    hint = ROW.quantize(x)
    guided = ops.MatmulSpec(weight=TENSOR, act=Quantizer(ROW.fmt, Guided()), backward=backward, grad=None)

    @jax.jit
    def both(near, w, hint):
        y, pull = jax.vjp(lambda x, w: ops.matmul(x, w, guided, hint=hint), near, w)
        return y, pull(jnp.ones_like(y)), ops.matmul(x, w, W4A4)

    y, (dx, dw), expected = both(near, w, hint)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))
    assert np.all(np.isfinite(dx)) and np.all(np.isfinite(dw))


def test_equal_specs_trace_once(rng: np.random.Generator) -> None:
    x, w = inputs(rng, m=2, n=16, k=16)
    traces = []

    @jax.jit
    def plain(x, w):
        traces.append(None)
        return ops.matmul(x, w)

    plain(x, w), plain(x, w)
    assert len(traces) == 1
    again = Quantizer(formats.make("nvfp4", outer="row"))
    assert ops.MatmulSpec(weight=TENSOR, act=again) == W4A4
    assert hash(ops.MatmulSpec(weight=TENSOR, act=again)) == hash(W4A4)


def test_prepare_leaves_other_leaves_alone(rng: np.random.Generator) -> None:
    _, w = inputs(rng)
    tree = {
        "norm": jnp.ones((3, 8), jnp.bfloat16),
        "w": jnp.ones((3, 8, 8), jnp.bfloat16),
        "q": ops.quantize_weight(w, TENSOR),
        "master": jnp.ones((3, 8, 8), jnp.float32),
    }
    prepared = ops.prepare(tree)
    assert prepared["norm"] is tree["norm"]
    assert prepared["master"] is tree["master"]
    assert isinstance(prepared["w"], Prepared)
    assert isinstance(prepared["q"], Prepared)
    assert ops.prepare(prepared)["q"].operand is prepared["q"].operand


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"x \(2, 3\) and w \(4, 5\)"):
        ops.matmul(jnp.ones((2, 3)), jnp.ones((4, 5)))


def test_a_gradient_quantizer_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ValueError, match="never quantizes gradients"):
        ops.MatmulSpec(grad=ROW)
    with pytest.raises(ValueError, match=r"unknown backward 'reuse': did you mean 'reused'"):
        ops.MatmulSpec(backward="reuse")  # pyright: ignore[reportArgumentType]


def test_a_clipped_gradient_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="act has ste='clipped'"):
        ops.MatmulSpec(act=Quantizer(ROW.fmt, ste="clipped"))
