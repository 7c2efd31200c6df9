"""Attention against a float64 oracle: grouped queries, shared segments, masks, empty rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import ops
from fp4rl_jax.ops import attention_cudnn
from fp4rl_jax.ops.machine import Machine
from fp4rl_jax.ops.spec import Side


def oracle(q, segments, scale: float) -> np.ndarray:
    """Softmax attention in float64 with every key and value repeated in full."""
    q = np.asarray(q, np.float64)
    b, _, h, _ = q.shape

    def whole(name: str) -> np.ndarray:
        parts = [np.asarray(getattr(s, name), np.float64) for s in segments]
        parts = [np.repeat(part, b // part.shape[0], axis=0) for part in parts]
        joint = np.concatenate(parts, axis=2)
        return np.repeat(joint, h // joint.shape[1], axis=1)

    mask = np.concatenate([np.asarray(s.mask) for s in segments], axis=-1)[:, None]
    scores = np.einsum("bthc,bhsc->bhts", q, whole("k")) * scale
    weights = np.where(mask, np.exp(scores), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhts,bhsc->bthc", weights, whole("v"))


def case(rng: np.random.Generator, *, b: int = 6, p: int = 3, t: int = 4, s: int = 7):
    """Six query heads on two key heads; a shared prompt segment and an own causal one."""
    q = jnp.asarray(rng.normal(size=(b, t, 6, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(p, 2, s, 8)), jnp.float32) for _ in range(2))
    own_k, own_v = (jnp.asarray(rng.normal(size=(b, 2, t, 8)), jnp.float32) for _ in range(2))
    seen = jnp.asarray(rng.random((b, t, s)) < 0.7)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
    return q, (ops.Segment(k, v, seen), ops.Segment(own_k, own_v, causal))


@pytest.mark.parametrize("order", ["free", "fixed"])
def test_two_segments_share_one_softmax(order, rng: np.random.Generator) -> None:
    q, segments = case(rng)
    out = jax.jit(lambda q, s: ops.attention(q, segments=s, scale=0.3, order=order))(q, segments)
    np.testing.assert_allclose(np.asarray(out), oracle(q, segments, 0.3), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("order", ["free", "fixed"])
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(order, rng: np.random.Generator) -> None:
    q, segments = case(rng)
    segments = tuple(s._replace(mask=s.mask.at[2, 1].set(False)) for s in segments)

    @jax.jit
    def value_and_gradients(q, k):
        def loss(q, k):
            out = ops.attention(q, segments=(segments[0]._replace(k=k), segments[1]), scale=0.3, order=order)
            return jnp.sum(out**2), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(q, k)

    (_, out), (dq, dk) = value_and_gradients(q, segments[0].k)
    np.testing.assert_array_equal(np.asarray(out)[2, 1], np.zeros((6, 8)))
    np.testing.assert_array_equal(np.asarray(dq)[2, 1], np.zeros((6, 8)))
    assert np.all(np.isfinite(np.asarray(dq))) and np.all(np.isfinite(np.asarray(dk)))
    assert np.abs(np.asarray(dk)).max() > 1e-3


def test_gradient_equals_finite_differences(rng: np.random.Generator) -> None:
    q, segments = case(rng, b=2, p=1, t=2, s=3)
    direction = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def loss(q):
        return jnp.sum(jnp.cos(ops.attention(q, segments=segments, scale=0.3)))

    slope = float(jnp.vdot(jax.grad(loss)(q), direction))
    step = 1e-2
    oracle_loss = [
        np.cos(oracle(np.asarray(q, np.float64) + sign * step * np.asarray(direction), segments, 0.3)).sum()
        for sign in (1, -1)
    ]
    assert slope == pytest.approx((oracle_loss[0] - oracle_loss[1]) / (2 * step), rel=1e-3)


def test_huge_scores_do_not_overflow(rng: np.random.Generator) -> None:
    q, segments = case(rng)
    out = ops.attention(q * 1e4, segments=segments, scale=1.0)
    assert np.all(np.isfinite(np.asarray(out)))


def test_bfloat16_output_is_near_the_oracle(rng: np.random.Generator) -> None:
    """Rounding of the probabilities and of the result: two roundings to 8 bits."""
    q, segments = case(rng)
    narrow = jax.tree.map(lambda a: a if a.dtype == bool else a.astype(jnp.bfloat16), (q, segments))
    out = ops.attention(narrow[0], segments=narrow[1], scale=0.3)
    assert out.dtype == jnp.bfloat16
    expected = oracle(*jax.tree.map(lambda a: np.asarray(a, np.float32), narrow), 0.3)
    limit = 2.0**-8 * (2 * np.abs(np.asarray(segments[0].v)).max() + np.abs(expected))
    assert np.all(np.abs(np.asarray(out, np.float64) - expected) <= limit)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"t": 8}, "fewer than 16"),
        ({"c": 12}, "head_dim 12"),
        ({"dtype": jnp.float32}, "bfloat16"),
        ({"machine": Machine(platform="cpu")}, "NVIDIA GPU"),
        ({"machine": Machine(platform="gpu", capability=(7, 5))}, "8.0"),
    ],
)
def test_cudnn_is_chosen_by_static_facts(change, says) -> None:
    facts = {"t": 32, "c": 64, "dtype": jnp.bfloat16, "machine": Machine(platform="gpu", capability=(9, 0))}
    facts |= change
    t, c, dtype = facts["t"], facts["c"], facts["dtype"]
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((2, t, 4, c), (2, 2, t, c)))
    segment = ops.Segment(k, k, jax.ShapeDtypeStruct((2, t, t), bool))  # pyright: ignore[reportArgumentType]
    reason = attention_cudnn.refusal(q, (segment,), facts["machine"])  # pyright: ignore[reportArgumentType]
    assert reason is None if says is None else says in reason


@pytest.mark.parametrize(("fused", "taken"), [("auto", True), ("never", False)])
def test_the_fused_kernel_is_left_where_the_side_says_so(fused, taken, rng, monkeypatch) -> None:
    """On a machine whose kernel takes every call."""
    calls = []
    monkeypatch.setattr(attention_cudnn, "refusal", lambda *facts: None)
    monkeypatch.setattr(attention_cudnn, "attention_cudnn", lambda q, *rest: calls.append(rest) or q)
    q, segments = case(rng)
    out = ops.attention(q, segments=segments, scale=0.3, fused=fused)
    assert bool(calls) == taken
    assert taken or np.abs(np.asarray(out) - oracle(q, segments, 0.3)).max() < 1e-5


def test_decoding_in_place_is_left_where_the_side_says_so() -> None:
    side = Side(specs=ops.SideSpec().resolve(()), fused_attention="never")
    reason = ops.decode_refusal(side, rows=8, prompts=2, heads=(6, 2), head_dim=64, columns=(64, 64))
    assert reason == 'ops.fused_attention is "never"'


def test_segments_that_do_not_fit_are_named(rng: np.random.Generator) -> None:
    q, (prompt, _) = case(rng)
    with pytest.raises(ValueError, match=r"mask \(6, 4, 6\) does not fit q \(6, 4, 6, 8\)"):
        ops.attention(q, segments=(prompt._replace(mask=prompt.mask[..., :-1]),), scale=1.0)


def test_rms_norm_equals_its_formula(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(3, 5, 64)) * 4, jnp.float32)
    w = jnp.asarray(rng.normal(size=64), jnp.float32)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + 1e-5) * np.asarray(w, np.float64)
    for order in ("free", "fixed"):
        got = ops.rms_norm(x, w, eps=1e-5, order=order)
        np.testing.assert_allclose(np.asarray(got), expected, rtol=2e-6, atol=1e-6)
        assert ops.rms_norm(x.astype(jnp.bfloat16), w, eps=1e-5, order=order).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"weight \(4,\) does not scale"):
        ops.rms_norm(x, jnp.ones(4), eps=1e-5)
