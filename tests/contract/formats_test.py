"""Every file found in fp4rl_jax/formats, with every option it has, through one suite.

A check may ask a format about itself (`block`, `span`, `scale_width`); none knows a name. All
checks of a mode share one shape, so each mode compiles once.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp4rl_jax
from fp4rl_jax import formats
from fp4rl_jax.formats import Format
from fp4rl_jax.quantizers import Quantizer, compact

MODES = [mode for name in formats.names() for mode in formats.variations(name)]
SHAPE = (32, 256)
slow = pytest.mark.slow  # seconds each, and there are many: each format's first mode is not slow
FIRST = [formats.make(name) for name in formats.names()]
each_mode = pytest.mark.parametrize(
    "fmt", [pytest.param(mode, marks=() if mode in FIRST else slow) for mode in MODES], ids=str
)
each_format = pytest.mark.parametrize("fmt", FIRST, ids=lambda f: f.name)


def draw(seed: int = 0) -> np.ndarray:
    """float32 values that bfloat16 holds too, of several magnitudes, with a zero block."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(SHAPE) * 2.0 ** rng.integers(-4, 5, (SHAPE[0], 1))
    x[3, :128] = 0
    return np.array(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def given(fmt: Format) -> dict[str, float]:
    """The keyword a format with a static outer scale needs: that of 128, which keeps `draw` in range."""
    largest = formats.bits.raw(jnp.float32(128))
    return {"outer_scale": fmt.outer_from_amax(largest)} if fmt.span == "static" else {}


def quantized(fmt: Format, x: np.ndarray | jax.Array, **options) -> fp4rl_jax.QTensor:
    return fp4rl_jax.quantize(jnp.asarray(x), fmt, **given(fmt), **options)


def same(a: fp4rl_jax.QTensor, b: fp4rl_jax.QTensor) -> bool:
    """Equal bytes, nans of an outer scale included."""
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


@each_mode
def test_it_is_a_value_found_by_its_file(fmt):
    twin = formats.make(fmt.name, **dataclasses.asdict(fmt))
    assert (twin == fmt, hash(twin) == hash(fmt), repr(twin) == repr(fmt)) == (True, True, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.name_of_no_field = 1
    with pytest.raises(ValueError, match="option of format"):
        formats.make(fmt, no_such_option=1)
    for field in dataclasses.fields(fmt):
        with pytest.raises(ValueError, match=f"{field.name} of format"):
            formats.make(fmt, **{field.name: "no such value"})


@pytest.mark.fast_cases("nvfp4")
@each_format
def test_encode_inverts_decode_on_every_code_and_scale(fmt):
    codes = jnp.arange(1 << fmt.code_bits, dtype=jnp.uint8)
    width = fmt.block or len(codes)
    codes = jnp.resize(codes, (-(-len(codes) // width) * width,))
    lead = jnp.arange(256, dtype=jnp.uint8) if fmt.scale_width else jnp.zeros(1, jnp.uint8)
    scales = jnp.zeros((len(lead), len(codes) // width, max(fmt.scale_width, 1)), jnp.uint8)
    scales = scales.at[..., 0].set(lead[:, None]).reshape(len(lead), -1)[:, : 256 * fmt.scale_width]
    values = np.asarray(jax.jit(fmt.decode)(codes, scales))
    again = np.asarray(jax.jit(fmt.encode)(jnp.asarray(values), scales))
    sign = 1 << (fmt.code_bits - 1)
    bits = values.view(np.int32) & 0x7FFFFFFF  # as bits: comparing subnormals as floats is a trap
    usable = (bits < 0x7F800000) & ((bits != 0) | (np.asarray(codes) == 0))
    usable &= np.asarray(codes) != sign
    usable = np.broadcast_to(usable, again.shape)
    assert usable.mean() > 0.4, "most codes under most scale bytes stand for a finite number"
    np.testing.assert_array_equal(again[usable], np.broadcast_to(codes, again.shape)[usable])


@each_mode
def test_a_value_takes_one_of_the_two_codes_around_it(fmt):
    x = draw()
    q = quantized(fmt, x)
    codes = np.asarray(q.codes())
    assert codes.shape == SHAPE and codes.max() < 1 << fmt.code_bits
    element = np.asarray(fmt.element(jnp.arange(1 << fmt.code_bits, dtype=jnp.uint8)), np.float64)
    ones = dataclasses.replace(q, packed=fmt.pack(jnp.ones(SHAPE, jnp.uint8)))
    unit = np.asarray(ones.dequantize(), np.float64) / element[1]  # what an element of 1 is worth
    values = np.where(np.isnan(element), np.inf, element)[:, None, None] * np.where(unit, unit, 1e-9)
    chosen = np.take_along_axis(values, codes[None].astype(int), axis=0)[0]
    distance = np.sort(np.abs(values - x), axis=0)
    # nearest, or a rounded reciprocal away from it: at most 2 % of the distance of the neighbours
    assert (np.abs(chosen - x) <= distance[0] + 0.02 * (distance[0] + distance[2])).all()
    np.testing.assert_allclose(np.asarray(q.dequantize(), np.float64), np.where(unit, chosen, 0), rtol=2e-7)


@each_mode
def test_sizes_are_exact(fmt):
    q = quantized(fmt, draw())
    outer = 0 if q.outer_scale is None else q.outer_scale.size * 4
    assert q.nbytes == np.prod(SHAPE) * fmt.bits_per_value / 8 + outer
    assert (q.shape, q.ndim, q.bits_per_value) == (SHAPE, 2, fmt.bits_per_value)
    assert (fmt.unpack(fmt.pack(q.codes())) == q.codes()).all()
    abstract = jax.eval_shape(lambda x: quantized(fmt, x), jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(
        lambda a: (a.shape, a.dtype), q
    )


@each_mode
def test_bfloat16_gives_the_bytes_of_float32(fmt):
    x = jnp.asarray(draw())
    assert same(quantized(fmt, x.astype(jnp.bfloat16)), quantized(fmt, x))


@pytest.mark.fast_cases(str(formats.make("mxfp4")))
@each_mode
def test_jit_gives_the_bytes_of_eager(fmt):
    """A quantizer is compiled when it is called; eager is one operation at a time."""
    x = jnp.asarray(draw())
    with jax.disable_jit():
        eager = quantized(fmt, x)
    assert same(quantized(fmt, x), eager)


@each_mode
def test_scan_and_vmap_give_the_same_bytes(fmt):
    stack = jnp.stack([jnp.asarray(draw()), -2 * jnp.asarray(draw(1))])
    _, scanned = jax.lax.scan(lambda _, x: (None, quantized(fmt, x)), None, stack)
    mapped = jax.vmap(lambda x: quantized(fmt, x))(stack)
    assert same(mapped, scanned)
    for i, one in enumerate(stack):
        assert same(jax.tree.map(lambda leaf, i=i: leaf[i], scanned), quantized(fmt, one))


@each_mode
def test_signs_and_powers_of_two_pass_through(fmt):
    x = draw()
    value = np.asarray(quantized(fmt, x).dequantize())
    np.testing.assert_array_equal(np.asarray(quantized(fmt, -x).dequantize()), -value)
    if fmt.span != "static":
        np.testing.assert_array_equal(np.asarray(quantized(fmt, x * 2.0**-9).dequantize()), value * 2.0**-9)


@each_mode
def test_zeros_give_zeros(fmt):
    q = quantized(fmt, np.zeros(SHAPE, np.float32))
    assert bool(q.finite)
    assert not np.asarray(q.dequantize()).any() and not np.asarray(q.codes()).any()
    assert not np.asarray(quantized(fmt, draw()).dequantize())[3, :128].any()


@each_mode
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_non_finite_value_poisons_its_block_alone(fmt, bad):
    x = draw()
    x[17, 40] = bad
    q = quantized(fmt, x)
    value = np.asarray(q.dequantize())
    poisoned = np.zeros(SHAPE, bool)
    width = fmt.block or SHAPE[1]
    first, row = 40 // width * width, 17 // fmt.block_rows * fmt.block_rows
    poisoned[row : row + fmt.block_rows, first : first + width] = True
    np.testing.assert_array_equal(np.isnan(value), poisoned)
    assert not bool(q.finite)
    assert (np.asarray(q.codes())[poisoned] == (fmt.code_nan or 0)).all()
    x[poisoned] = 0
    np.testing.assert_array_equal(value[~poisoned], np.asarray(quantized(fmt, x).dequantize())[~poisoned])


@each_mode
def test_fake_quantize_is_the_round_trip_with_a_straight_through_gradient(fmt):
    x, dy = jnp.asarray(draw()), jnp.asarray(draw(1))
    q = Quantizer(fmt)
    value, pull = jax.vjp(lambda x: q.fake_quantize(x, **given(fmt)), x)
    assert (value == quantized(fmt, x).dequantize()).all()
    assert (pull(dy)[0] == dy).all()


@each_format
def test_operands_are_exact_in_bfloat16_and_need_no_packing(fmt):
    x = jnp.asarray(draw())
    inner, outer = Quantizer(fmt).inner(x, dtype=jnp.bfloat16, **given(fmt))
    whole = quantized(fmt, x)
    assert (inner == whole.inner(jnp.bfloat16)).all()
    assert (inner.astype(jnp.float32) == whole.inner()).all(), "bfloat16 holds element * block scale"
    assert outer is None or (outer == whole.outer_scale).all()


@each_format
def test_stochastic_rounding_takes_neighbours_and_obeys_its_key(fmt):
    x, keys = draw(), jax.random.split(jax.random.key(7), 2)
    first, again, other = (
        quantized(fmt, x, rounding=fp4rl_jax.Stochastic(), key=k) for k in (keys[0], keys[0], keys[1])
    )
    assert same(first, again)
    assert (first.codes() != other.codes()).mean() > 0.05
    near = quantized(fmt, x)
    mask = (1 << (fmt.code_bits - 1)) - 1
    step = (first.codes() & mask).astype(int) - (near.codes() & mask).astype(int)
    assert np.abs(np.asarray(step)).max() == 1
    with pytest.raises(ValueError, match="key="):
        quantized(fmt, x, rounding=fp4rl_jax.Stochastic())


@each_format
def test_guidance_reproduces_the_rollout_where_it_can(fmt):
    x = draw()
    rollout = quantized(fmt, x * (1 + 0.01 * np.random.default_rng(2).standard_normal(SHAPE, np.float32)))
    full = quantized(fmt, x, rounding=fp4rl_jax.Guided(), hint=rollout)
    half = quantized(fmt, x, rounding=fp4rl_jax.Guided(), hint=compact(rollout))
    assert (full.scales == rollout.scales).all()
    nearest = jax.jit(fmt.encode)(jnp.asarray(x), rollout.scales, rollout.outer_scale)
    plain = rollout.replace(packed=fmt.pack(nearest))
    value, target, plain = (np.asarray(q.inner(), np.float64) for q in (full, rollout, plain))
    assert (np.abs(value - target) <= np.abs(plain - target)).all()
    reached = np.asarray(full.codes()) == np.asarray(rollout.codes())
    assert reached.mean() > 0.97
    np.testing.assert_array_equal(np.asarray(half.codes())[reached], np.asarray(rollout.codes())[reached])
    with pytest.raises(ValueError, match="hint="):
        quantized(fmt, x, rounding=fp4rl_jax.Guided())


@pytest.mark.fast_cases("8-1-nvfp4")
@each_format
@pytest.mark.parametrize("axis", [pytest.param(0, marks=slow), 1])
@pytest.mark.parametrize("devices", [pytest.param(2, marks=slow), pytest.param(4, marks=slow), 8])
def test_a_shard_gives_the_bytes_of_the_whole(fmt, axis, devices):
    x = jnp.asarray(np.resize(draw(), (32, 1024)))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    split = P("d", None) if axis == 0 else P(None, "d")
    whole = quantized(fmt, x)
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, split))
    assert same(jax.jit(lambda x: quantized(fmt, x))(sharded), whole)
    across = {"tensor": True, "row": axis == 1}.get(fmt.span, False)
    mapped = jax.shard_map(
        lambda x: quantized(fmt, x, axis_name="d" if across else None),
        mesh=mesh,
        in_specs=split,
        out_specs=_specs(whole, split),
    )(x)
    assert same(mapped, whole)


def _specs(q: fp4rl_jax.QTensor, split: P) -> fp4rl_jax.QTensor:
    spans = {"none": None, "tensor": P(), "row": P(split[0], None), "block": split, "static": P()}
    return q.replace(packed=split, scales=split, outer_scale=spans[q.fmt.span])
