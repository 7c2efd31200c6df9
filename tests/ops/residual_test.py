"""The second term in the matmul: right products, the same weight, the same bits however it is prepared."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.ops.matmul import summed
from fp4rl_jax.ops.operands import split_columns
from fp4rl_jax.quantizers import Quantizer, Stochastic, residual
from fp4rl_jax.quantizers.residual import ChannelStats, Residual

ROW = Quantizer(formats.make("nvfp4", outer="row"))
TENSOR = Quantizer(formats.make("nvfp4", outer="tensor"))
HIF4 = Quantizer(formats.make("hif4"))
PLAIN = ops.MatmulSpec(weight=TENSOR, act=ROW)


def nvfp4(name: str, order: str, **options: object) -> ops.MatmulSpec:
    second = Residual(selection=residual.make(name, **options), quantizer=ROW, order=order)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(PLAIN, residual=second)


STATIC = nvfp4("blocks", "select_first")
SPECS = {
    "static": STATIC,
    "call": nvfp4("channels", "select_first", scope="call"),
    "token": nvfp4("blocks", "select_first", scope="token"),
    "pattern": nvfp4("pattern_2_4", "quantize_first"),
    "hif4": ops.MatmulSpec(
        weight=HIF4,
        act=HIF4,
        residual=Residual(selection=residual.make("pairs_4_8"), quantizer=HIF4),
    ),
}

MXFP4 = ops.MatmulSpec(
    weight=Quantizer(formats.make("mxfp4")),
    act=Quantizer(formats.make("mxfp4")),
    residual=Residual(selection=residual.make("pattern_2_4"), quantizer=Quantizer(formats.make("mxfp4"))),
)


def inputs(rng: np.random.Generator) -> tuple[jax.Array, jax.Array, ChannelStats]:
    x = jnp.asarray(rng.normal(size=(2, 5, 128)) * 3, jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(24, 128)) * 0.05, jnp.float32)
    energy = jnp.asarray(rng.random(128), jnp.float32)
    return x, w, ChannelStats(energy=energy, residual_max=energy, act_max=energy)


def published(w: jax.Array, spec: ops.MatmulSpec, stats: ChannelStats):
    return (
        ops.calibrated_weight(w, spec, stats) if spec.needs_columns else ops.quantize_weight(w, spec.weight)
    )


@functools.partial(jax.jit, static_argnames="spec")
def everything(x, w, stats, *, spec: ops.MatmulSpec):
    """The product from a published, a prepared and an unpublished weight, fixed order, and its operands."""
    q = published(w, spec, stats)
    columns = getattr(q, "columns", None)
    ways = [ops.matmul(x, v, spec, out_dtype=jnp.float32) for v in (q, ops.prepare(q))]
    if columns is None:
        ways.append(ops.matmul(x, w, spec, out_dtype=jnp.float32))
    fixed = ops.matmul(x, q, spec, order="fixed")
    alone = ops.matmul(x[1, 2:4], ops.prepare(q), spec, order="fixed")
    parts = spec.residual.split(x.reshape(-1, 128), spec.act, dtype=jnp.float32, columns=columns)
    first, second = (v if outer is None else v * outer for v, outer in parts)
    if columns is not None:
        second = residual.placed(second, columns, first.shape)
    return ways, fixed, alone, (first, second)


@pytest.mark.fast_cases("static")
@pytest.mark.parametrize("name", SPECS)
def test_two_terms_with_one_weight(name: str, rng: np.random.Generator) -> None:
    """Equals the float64 sum of both products within the accumulator's bound; same bits in every form."""
    spec = SPECS[name]
    x, w, stats = inputs(rng)
    ways, fixed, alone, (first, second) = everything(x, w, stats, spec=spec)
    for way in ways[1:]:
        np.testing.assert_array_equal(np.asarray(way), np.asarray(ways[0]))
    weight = np.asarray(ops.quantize_weight(w, spec.weight).dequantize(), np.float64)
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    assert np.any(b != 0)
    exact = (a + b) @ weight.T
    bound = (128 + 6) * 2.0**-24 * ((np.abs(a) + np.abs(b)) @ np.abs(weight).T)
    assert np.all(np.abs(np.asarray(ways[0], np.float64).reshape(10, 24) - exact) <= bound)
    if spec.batch_invariant:
        np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(fixed[1, 2:4], np.float32))


def test_codes_and_scales_of_the_weight_are_used_again(rng: np.random.Generator) -> None:
    """Calibration adds columns to the published weight and changes none of its bytes."""
    _, w, stats = inputs(rng)
    plain = ops.quantize_weight(w, TENSOR)
    corrected = ops.calibrated_weight(w, STATIC, stats)
    for leaf in ("packed", "scales", "outer_scale"):
        np.testing.assert_array_equal(getattr(corrected.weight, leaf), getattr(plain, leaf))
    prepared = ops.prepare_weight(plain)
    assert isinstance(prepared, ops.Prepared)
    split = split_columns(prepared, corrected.columns)
    whole = np.asarray(prepared.operand, np.float32)
    np.testing.assert_array_equal(np.asarray(split.selected.operand, np.float32), whole[:, split.columns])
    np.testing.assert_array_equal(np.asarray(split.rest.operand, np.float32), whole[:, split.others])
    np.testing.assert_array_equal(np.sort(np.concatenate([split.columns, split.others])), np.arange(128))


def test_the_gradient_is_that_of_the_first_term(rng: np.random.Generator) -> None:
    x, w, _ = inputs(rng)
    x = x.astype(jnp.float32)

    def pull(spec):
        return jax.jit(jax.grad(lambda x, w: jnp.sum(ops.matmul(x, w, spec)), argnums=(0, 1)))(x, w)

    for a, b in zip(pull(SPECS["pattern"]), pull(PLAIN), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_experts_get_both_terms_too(rng: np.random.Generator) -> None:
    """Two experts with one set of columns equal the two dense products."""
    x, w, stats = inputs(rng)
    flat, both = x.reshape(-1, 128), jnp.stack([w, 2.5 * w[::-1]])
    sizes = jnp.asarray([4, 6], jnp.int32)

    @jax.jit
    def run(flat, both):
        q = ops.calibrated_weight(both, STATIC, stats)
        grouped = ops.grouped_matmul(flat.astype(jnp.float32), ops.prepare(q), sizes, STATIC)
        dense = [
            ops.matmul(rows.astype(jnp.float32), ops.calibrated_weight(v, STATIC, stats), STATIC)
            for rows, v in ((flat[:4], both[0]), (flat[4:], both[1]))
        ]
        return grouped, jnp.concatenate(dense)

    grouped, dense = map(np.asarray, run(flat, both))
    scale = np.abs(np.asarray(flat, np.float32)) @ np.abs(np.asarray(w)).T.max(axis=1)
    assert np.all(np.abs(grouped - dense) <= 2 * 2.5 * 300 * 2.0**-24 * scale[:, None])


def test_a_static_selection_without_its_columns_is_refused(rng: np.random.Generator) -> None:
    x, w, stats = inputs(rng)
    with pytest.raises(ValueError, match="weight comes without columns"):
        ops.matmul(x, ops.quantize_weight(w, TENSOR), STATIC)
    with pytest.raises(ValueError, match="weight comes with columns"):
        ops.matmul(x, ops.calibrated_weight(w, STATIC, stats), PLAIN)
    with pytest.raises(ValueError, match="never differentiated"):
        q = ops.calibrated_weight(w, STATIC, stats)
        jax.grad(lambda x: jnp.sum(ops.matmul(x, q, STATIC)))(x.astype(jnp.float32))
    with pytest.raises(ValueError, match="corrects a quantized activation"):
        ops.MatmulSpec(weight=TENSOR, residual=STATIC.residual)


@pytest.mark.parametrize("name", ["static", "pattern", "mxfp4"])
def test_float32_holds_the_sum_of_both_operands(name: str, rng: np.random.Generator) -> None:
    """Values over twelve binades in a block: nothing of the sum is rounded away."""
    spec = SPECS[name] if name in SPECS else MXFP4
    assert spec.act is not None and spec.residual is not None
    x = jnp.asarray(rng.normal(size=(40, 256)) * np.exp(3 * rng.normal(size=(40, 256))), jnp.bfloat16)
    columns = jnp.arange(32, 96) if spec.needs_columns else None
    assert spec.residual.sums_exactly(x.dtype, spec.act)
    parts = spec.residual.split(x, spec.act, dtype=jnp.float32, columns=columns)
    first, second = (ops.Prepared(operand=values, outer_scale=outer) for values, outer in parts)
    found = summed(first, second, columns)
    expected = dense(first)
    expected[:, slice(None) if columns is None else np.asarray(columns)] += dense(second)
    np.testing.assert_array_equal(dense(found), expected)


def dense(operand: ops.Prepared) -> np.ndarray:
    scale = 1.0 if operand.outer_scale is None else np.asarray(operand.outer_scale, np.float64)
    return np.asarray(operand.operand, np.float64) * scale


def test_sums_that_need_more_bits_are_not_made() -> None:
    second = STATIC.residual
    assert isinstance(second, Residual)
    assert not second.sums_exactly(jnp.float32, ROW)
    assert not second.sums_exactly(jnp.bfloat16, HIF4)
    assert not second.sums_exactly(jnp.bfloat16, dataclasses.replace(ROW, rounding=Stochastic()))
    vendor = Quantizer(formats.make("nvfp4", outer="row", outer_rounding="fp32"))
    assert not second.sums_exactly(jnp.bfloat16, vendor)
    assert not dataclasses.replace(second, quantizer=vendor).sums_exactly(jnp.bfloat16, ROW)
    assert not residual.OutlierClamp().sums_exactly(jnp.bfloat16, ROW)
