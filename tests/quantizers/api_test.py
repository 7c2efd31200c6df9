"""The public functions: ranks, axes, ragged blocks, joint scales, errors that name the nearest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4rl_jax
from fp4rl_jax import Nearest, QTensor, formats
from fp4rl_jax.quantizers import Quantizer

KEY = jax.random.key(0)


@pytest.mark.fast_cases("nvfp4-shape0-axes0", "mxfp4-shape3-axes3", "hif4-shape4-axes4")
@pytest.mark.parametrize(
    "fmt, shape, axes",
    [
        ("nvfp4", (), (-1, 0)),
        ("nvfp4", (3,), (-2, -1, 0, 1)),
        ("nvfp4", (2, 3, 5), (-4, -2, 1, 3)),
        ("mxfp4", (2, 3), (1,)),
        ("hif4", (2, 3), (0,)),
        ("fp8_e4m3", (2, 3), (-2,)),
    ],
)
def test_any_rank_and_axis_gives_what_moving_the_axis_gives(fmt, shape, axes):
    """The quantized axis, of 128 values, at several places of arrays of rank 1 to 4."""
    last = jax.random.normal(KEY, (*shape, 128))
    wanted = fp4rl_jax.quantize(last, fmt).dequantize()
    for axis in axes:
        x = jnp.moveaxis(last, -1, axis)
        q = fp4rl_jax.quantize(x, fmt, axis=axis)
        assert (q.shape, q.axis) == (x.shape, axis - x.ndim if axis >= 0 else axis)
        assert (q.dequantize() == jnp.moveaxis(wanted, -1, axis)).all()
        assert q.codes().shape == x.shape


@pytest.mark.fast_cases("70-nvfp4", "70-hif4", "1-mxfp4")
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "hif4", "fp8_e4m3"])
@pytest.mark.parametrize("length", [1, 70])
def test_a_ragged_last_block_is_padded_with_zeros(fmt, length):
    x = jax.random.normal(KEY, (4, length))
    q = fp4rl_jax.quantize(x, fmt)
    block = q.fmt.block or length
    padded = -(-length // block) * block
    assert q.shape == (4, length) and q.length == length
    assert q.packed.shape == (4, padded * q.fmt.code_bits // 8)
    whole = fp4rl_jax.quantize(jnp.pad(x, ((0, 0), (0, padded - length))), fmt)
    assert (q.packed == whole.packed).all() and (q.scales == whole.scales).all()
    assert (q.dequantize() == whole.dequantize()[:, :length]).all()


def test_an_empty_array_quantizes_to_nothing():
    for fmt in formats.names():
        q = fp4rl_jax.quantize(jnp.zeros((0, 64)), fmt)
        assert q.dequantize().shape == (0, 64) and bool(q.finite)


def test_a_joint_outer_scale_gives_the_codes_of_the_joined_array():
    parts = [
        s * jax.random.normal(k, (n, 64))
        for s, k, n in zip((1, 3, 9), jax.random.split(KEY, 3), (32, 16, 16), strict=True)
    ]
    joined = fp4rl_jax.quantize(jnp.concatenate(parts), "nvfp4")
    outer = joined.outer_scale
    alone = [fp4rl_jax.quantize(p, "nvfp4", outer="static", outer_scale=outer) for p in parts]
    assert (jnp.concatenate([q.codes() for q in alone]) == joined.codes()).all()
    assert (jnp.concatenate([q.scale_bytes() for q in alone]) == joined.scale_bytes()).all()


def test_a_static_scale_may_differ_by_head():
    """A KV cache: one power of two per head, blocks along the head's channels."""
    x = jax.random.normal(KEY, (2, 5, 3, 32)) * jnp.array([1.0, 8.0, 64.0])[:, None]
    outer = jnp.array([2.0**-9, 2.0**-6, 2.0**-3])[None, None, :, None]
    q = fp4rl_jax.quantize(x, "nvfp4", outer="static", outer_scale=outer)
    for head in range(3):
        one = fp4rl_jax.quantize(x[:, :, head], "nvfp4", outer="static", outer_scale=outer[0, 0, head, 0])
        assert (q.dequantize()[:, :, head] == one.dequantize()).all()


def test_a_row_scale_makes_a_token_independent_of_its_neighbours():
    x = jax.random.normal(KEY, (6, 64))
    x = x.at[3].mul(1000)
    whole = fp4rl_jax.quantize(x, "nvfp4", outer="row")
    assert whole.outer_scale.shape == (6, 1)
    for i in range(6):
        one = fp4rl_jax.quantize(x[i], "nvfp4", outer="row")
        assert (one.codes() == whole.codes()[i]).all() and (one.scale_bytes() == whole.scale_bytes()[i]).all()
    tensor = fp4rl_jax.quantize(x, "nvfp4")
    assert (tensor.scale_bytes() != whole.scale_bytes()).any()


def test_square_blocks_give_a_matrix_and_its_transpose_the_same_values():
    w = jax.random.normal(KEY, (50, 70))
    q = fp4rl_jax.quantize(w, "nvfp4", block_shape="16x16")
    turned = fp4rl_jax.quantize(w, "nvfp4", block_shape="16x16", axis=0)
    assert (q.dequantize() == turned.dequantize()).all()
    transposed = fp4rl_jax.quantize(w.T, "nvfp4", block_shape="16x16")
    assert (transposed.dequantize() == q.dequantize().T).all()
    plain = fp4rl_jax.quantize(w, "nvfp4")
    assert (plain.dequantize() != fp4rl_jax.quantize(w, "nvfp4", axis=0).dequantize()).any()


def test_the_outer_scale_is_the_smallest_sufficient_power_of_two():
    for amax, expected in ((2688.0, 1.0), (2688.001, 2.0), (1344.0, 0.5), (1e-30, None), (0.0, 1.0)):
        q = fp4rl_jax.quantize(jnp.zeros(16).at[3].set(-amax), "nvfp4")
        outer = float(q.outer_scale)
        assert expected is None or outer == expected
        assert amax == 0 or 1344 * outer < np.float32(amax) <= 2688 * outer
    q = fp4rl_jax.quantize(jnp.zeros(16).at[3].set(1536.0), "nvfp4", four_over_six="mse")
    assert float(q.outer_scale) == 1.0


def test_dequantized_values_are_exact_in_bfloat16():
    x = jax.random.normal(KEY, (64, 256))
    for fmt in ("nvfp4", "mxfp4", "hif4"):
        q = fp4rl_jax.quantize(x, fmt)
        assert (q.dequantize(jnp.bfloat16).astype(jnp.float32) == q.dequantize()).all()
        assert (q.inner(jnp.bfloat16).astype(jnp.float32) == q.inner()).all()


def test_a_weight_is_quantized_again_to_the_same_bytes():
    """In E4M3's normal range, with a power-of-two outer scale."""
    for fmt in ("nvfp4", "mxfp4"):
        q = fp4rl_jax.quantize(jax.random.normal(KEY, (64, 256)), fmt)
        again = fp4rl_jax.quantize(q.dequantize(), fmt)
        assert (again.dequantize() == q.dequantize()).all()


def test_stacked_tensors_go_through_vmap_and_scan():
    x = jax.random.normal(KEY, (3, 32, 64)) * jnp.array([1.0, 10.0, 100.0])[:, None, None]
    stacked = jax.vmap(lambda w: fp4rl_jax.quantize(w, "nvfp4"))(x)
    assert stacked.shape == (3, 32, 64) and stacked.outer_scale.shape == (3,)
    _, values = jax.lax.scan(lambda _, q: (None, q.dequantize()), None, stacked)
    assert (values == stacked.dequantize()).all()
    assert (values[1] == fp4rl_jax.quantize(x[1], "nvfp4").dequantize()).all()


def test_quantizers_are_values_and_trace_once():
    traces = []

    @jax.jit
    def count(x):
        traces.append(1)
        return x

    def run(quantizer, x):
        return jax.jit(lambda x, q: count(q.quantize(x).packed), static_argnums=1)(x, quantizer)

    x = jax.random.normal(KEY, (4, 64))
    for _ in range(2):
        quantizer = Quantizer(formats.make("nvfp4", outer="row"), Nearest())
        assert hash(quantizer) == hash(Quantizer(formats.make("nvfp4", outer="row")))
        run(quantizer, x)
    assert len(traces) == 1
    assert dataclasses.replace(quantizer, ste="clipped") != quantizer
    assert Quantizer("mxfp4").fmt == formats.make("mxfp4")


def test_qtensor_is_a_pytree_whose_facts_are_static():
    q = fp4rl_jax.quantize(jnp.ones((4, 32)), "nvfp4")
    leaves, tree = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == [jnp.uint8, jnp.uint8, jnp.float32]
    assert jax.tree.unflatten(tree, leaves).fmt == q.fmt
    assert len(jax.tree.leaves(fp4rl_jax.quantize(jnp.ones((4, 32)), "mxfp4"))) == 2
    assert isinstance(q, QTensor) and q.size == 128 and q.nbytes == 128 * 4.5 / 8 + 4


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: fp4rl_jax.quantize(x, "nvpf4"), "unknown format 'nvpf4': did you mean 'nvfp4'"),
        (
            lambda x: fp4rl_jax.quantize(x, "nvfp4", outr="row"),
            "unknown option of format nvfp4 'outr'.*'outer'",
        ),
        (
            lambda x: fp4rl_jax.quantize(x, "nvfp4", outer="rows"),
            "unknown outer of format nvfp4 'rows'.*'row'",
        ),
        (lambda x: fp4rl_jax.quantize(x, "mxfp4", scale_rule="flor"), "did you mean 'floor'"),
        (lambda x: fp4rl_jax.quantize(x, "fp8_e4m3", block_size=127), "did you mean '128'"),
        (
            lambda x: fp4rl_jax.quantize(x, "nvfp4", axis=2),
            r"unknown axis of an array of shape \(4, 64\) '2'",
        ),
        (lambda x: fp4rl_jax.quantize(x, "nvfp4", outer="static"), "needs outer_scale=, and got None"),
        (lambda x: fp4rl_jax.quantize(x, "nvfp4", outer_scale=1.0), 'outer_scale= is for outer="static"'),
        (lambda x: fp4rl_jax.quantize(x, "mxfp4", outer_scale=1.0), 'outer_scale= is for outer="static"'),
        (
            lambda x: fp4rl_jax.quantize(x, "nvfp4", outer="static", outer_scale=jnp.ones(4)),
            r"outer_scale has shape \(4,\): expected a scalar, or 2 axes",
        ),
        (
            lambda x: fp4rl_jax.quantize(x[0], "nvfp4", block_shape="16x16"),
            r"needs two axes, got shape \(64,\)",
        ),
    ],
)
def test_a_mistake_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((4, 64)))


def test_other_dtypes_are_refused():
    for dtype in (jnp.float16, jnp.int32):
        with pytest.raises(TypeError, match=f"takes float32 or bfloat16, got {jnp.dtype(dtype)}"):
            fp4rl_jax.quantize(jnp.ones((4, 64), dtype), "nvfp4")


def test_poison_marks_are_the_formats_own():
    x = jnp.ones((2, 128)).at[1, 70].set(jnp.nan)
    for fmt, byte in (("nvfp4", 0x7F), ("mxfp4", 255), ("hif4", 0xFF)):
        q = fp4rl_jax.quantize(x, fmt)
        marks = np.asarray(q.scales).reshape(2, -1, q.fmt.scale_width)[..., 0] == byte
        assert marks.sum() == 1 and marks[1, 70 // q.fmt.block] and not bool(q.finite)
    q = fp4rl_jax.quantize(x, "fp8_e4m3", block_size=128)
    assert np.isnan(np.asarray(q.outer_scale)).tolist() == [[False], [True]] and not bool(q.finite)
    q = fp4rl_jax.quantize(jnp.ones((2, 64)), "nvfp4", outer="static", outer_scale=jnp.nan)
    assert not bool(q.finite) and np.isnan(np.asarray(q.dequantize())).all()
