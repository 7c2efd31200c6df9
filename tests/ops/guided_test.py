"""Guidance inside a matmul: worked counts, the straight-through gradient, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.ops.spec import Capture, MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Guided, Quantizer, compact
from fp4rl_jax.quantizers.guidance import agreement

ACT = Quantizer(formats.make("nvfp4", outer="row"))
GUIDED = dataclasses.replace(ACT, rounding=Guided())


def block(*head: float) -> jnp.ndarray:
    return jnp.asarray([[*head, *([0.0] * (16 - len(head)))]], jnp.float32)


def test_what_guidance_moves_and_cannot_reach_by_hand():
    """All at scale 1. 2.4 follows 3; -0.1, 2.6 and 9 lie between codes that are not the rollout's."""
    rollout = ACT.quantize(block(6.0, 2.6, 0.3, 1.0, 3.1, -0.1))
    x = block(6.0, 2.4, -0.1, 2.6, 9.0, 0.1)
    full = agreement(x, ACT.fmt, rollout)
    one_bit = agreement(x, ACT.fmt, compact(rollout))
    assert np.flatnonzero(full.moved[0]).tolist() == [1, 3]
    assert np.flatnonzero(full.outside[0]).tolist() == [2, 3, 4]  # 0.1 meets -0, which is 0
    assert np.flatnonzero(one_bit.moved[0]).tolist() == [1, 2, 3]
    assert one_bit.outside is None and full.recorded.tolist() == [True]
    guided = GUIDED.quantize(x, hint=rollout).dequantize()[0, :6].tolist()
    assert guided == [6.0, 3.0, 0.0, 2.0, 6.0, 0.0]
    parity = GUIDED.quantize(x, hint=compact(rollout)).dequantize()[0, :6].tolist()
    assert parity == [6.0, 3.0, -0.5, 2.0, 6.0, 0.0]
    found = ops.guided_stats(x, GUIDED, rollout, mask=jnp.array([True]), stats="on")
    assert {n: (int(s.total), int(s.count)) for n, s in found.items()} == {
        "guided": (2, 16),
        "outside": (3, 16),
    }


def test_tokens_that_were_not_recorded_count_nowhere():
    x = jnp.concatenate([block(6.0, 2.4), block(6.0, 2.4), block(6.0, 2.4)])
    hint = jax.tree.map(lambda leaf: leaf.at[1].set(0), ACT.quantize(jnp.flip(x, axis=-1)))
    found = ops.guided_stats(x, GUIDED, hint, mask=jnp.array([True, True, False]), stats="on")
    assert int(found["outside"].count) == 16
    assert not GUIDED.quantize(x, hint=hint).codes()[1].any()  # scale 0: zeros


@pytest.mark.parametrize("form", ["full", "compact"])
def test_the_gradient_passes_straight_through_the_guided_activation(form):
    """dx is that of the plain quantizer, dw the product with the guided values."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 32), (8, 32), (4, 8)))
    rollout = ACT.quantize(x + 0.1 * jnp.asarray(rng.normal(size=x.shape), jnp.float32))
    hint = compact(rollout) if form == "compact" else rollout
    weight = Quantizer(formats.make("nvfp4", outer="tensor"))

    @jax.jit
    def products(x, w, hint):
        spec = MatmulSpec(weight=weight, act=GUIDED)
        y, pull = jax.vjp(lambda x, w: ops.matmul(x, w, spec, hint=hint), x, w)
        plain, _ = jax.vjp(lambda x, w: ops.matmul(x, w, MatmulSpec(weight=weight, act=ACT)), x, w)
        return y, pull(dy), plain, ops.matmul(x, w, spec)

    y, (dx, dw), plain, unhinted = products(x, w, hint)
    xq, wq = GUIDED.quantize(x, hint=hint).dequantize(), weight.quantize(w).dequantize()
    close = {"rtol": 0, "atol": 32 * 2.0**-22 * float(jnp.abs(xq).max() * jnp.abs(wq).max())}
    np.testing.assert_allclose(y, xq @ wq.T, **close)
    close["atol"] = 32 * 2.0**-22 * float(jnp.abs(dy).max() * max(jnp.abs(xq).max(), jnp.abs(wq).max()))
    np.testing.assert_allclose(dx, dy @ wq, **close)
    np.testing.assert_allclose(dw, dy.T @ xq, **close)
    assert (np.asarray(y) != np.asarray(plain)).any()  # the hint matters
    np.testing.assert_array_equal(unhinted, plain)  # without one it rounds to nearest


def spec_of(act: Quantizer | None, **options) -> SideSpec:
    weight = None if act is None else act
    return SideSpec(
        rules=(("mlp/*", MatmulSpec(weight=weight, act=act, **options)),),
        capture=Capture(sites=("mlp/gate_up",)),
    )


def test_captures_that_no_trainer_could_follow_are_refused():
    sites = ("attn/qkv", "mlp/gate_up")
    assert spec_of(ACT).resolve(sites).capture.sites == ("mlp/gate_up",)
    assert spec_of(ACT).resolve(sites) == spec_of(ACT).resolve(sites)
    with pytest.raises(ValueError, match="captured site .*'mlp/gte_up'"):
        dataclasses.replace(spec_of(ACT), capture=Capture(sites=("mlp/gte_up",))).resolve(sites)
    with pytest.raises(ValueError, match="attn/qkv is captured, and its activations are not quantized"):
        dataclasses.replace(spec_of(ACT), capture=Capture(sites=("attn/*",))).resolve(sites)
    with pytest.raises(ValueError, match="codes depend on other tokens"):
        spec_of(Quantizer(formats.make("nvfp4", outer="tensor"))).resolve(sites)
    with pytest.raises(ValueError, match="smoothing = 0.5"):
        spec_of(ACT, smoothing=0.5).resolve(sites)
    with pytest.raises(ValueError, match=r"depth = 1.5: expected a share of the layers in \(0, 1\]"):
        Capture(sites=("mlp/gate_up",), depth=1.5)
    with pytest.raises(ValueError, match="form"):
        Capture(sites=("mlp/gate_up",), form="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="at least one site pattern"):
        Capture(sites=())


def test_depth_counts_the_deepest_layers_and_at_least_one():
    firsts = [Capture(sites=("*",), depth=d).first_layer(40) for d in (1.0, 0.5, 0.25, 0.001)]
    assert firsts == [0, 20, 30, 39]
    assert [Capture(sites=("*",)).first_layer(n) for n in (1, 2, 3, 30)] == [0, 1, 1, 15]
