"""Every code, every scale byte, every rounding midpoint and its two float neighbours."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4rl_jax
from fp4rl_jax import formats
from fp4rl_jax.formats import _bits, _e4m3
from tests.formats import oracle

encode = functools.cache(lambda fmt: jax.jit(fmt.encode))
decode = functools.cache(lambda fmt: jax.jit(fmt.decode))
BF16 = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)  # all finite >= 0


def midpoints(grid: np.ndarray, *, ties: str) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints of a grid with their float32 neighbours, and the codes they must take: [7, 3]."""
    middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    x = np.stack([np.nextafter(middle, 0), middle, np.nextafter(middle, np.inf)], axis=-1)
    below = np.arange(len(middle))
    tie = below + 1 if ties == "away" else below + below % 2
    return x, np.stack([below, tie, below + 1], axis=-1)


def test_every_e4m3_byte_decodes_as_ml_dtypes_has_it():
    theirs = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(_e4m3.decode(jnp.arange(128, dtype=jnp.uint8))), theirs)
    np.testing.assert_array_equal(theirs[:127], oracle.E4M3)


def test_every_bfloat16_rounds_to_e4m3_as_ml_dtypes_has_it():
    ours = np.asarray(_e4m3.round_log(_bits.from_float(jnp.asarray(BF16))))
    theirs = np.minimum(BF16, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(ours, theirs)


def test_every_bfloat16_rounds_to_e2m1_as_ml_dtypes_has_it():
    fmt = formats.make("mxfp4")
    x = np.pad(BF16, (0, -len(BF16) % 32))
    scales = jnp.full(len(x) // 32, 127, jnp.uint8)  # 2^0
    theirs = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    np.testing.assert_array_equal(np.asarray(encode(fmt)(jnp.asarray(x), scales)), theirs)


def test_hif4_scales_rounded_up_are_the_smallest_under_which_nothing_is_clipped():
    """At and beside 7 times every E6M2 value; then the factors of random blocks, against float64."""
    fmt = formats.make("hif4", scale_rounding="up")
    level = np.array([2.0 ** (e - 48) * (1 + m / 4) for e in range(64) for m in range(4)][:255])
    edge = (7 * level).astype(np.float32)  # exact
    peaks = np.stack([np.nextafter(edge, 0), edge, np.nextafter(edge, np.inf)], -1)[:-1].reshape(-1)
    rng = np.random.default_rng(0)
    rest = rng.choice([1.0, 2.0**-1, 2.0**-2, 2.0**-5], (len(peaks), 64)) * rng.choice(
        [-1, 1], (len(peaks), 64)
    )
    x = (peaks[:, None] * rest * rng.uniform(0.4, 1.0, rest.shape)).astype(np.float32)
    x[:, 9] = peaks
    q = fp4rl_jax.quantize(jnp.asarray(x), fmt)
    scale = np.asarray(q.scale_bytes()).reshape(-1, 4).astype(int)
    np.testing.assert_array_equal(scale[:, 0], np.searchsorted(7 * level, peaks.astype(np.float64)))
    e, v4 = level[scale[:, :1]], np.abs(x.astype(np.float64)).reshape(-1, 16, 4).max(-1)
    two = np.repeat(v4.reshape(-1, 8, 2).max(-1) > 3.5 * e, 2, axis=-1)
    three = v4 > np.where(two, 3.5, 1.75) * e
    np.testing.assert_array_equal(scale[:, 1], (two[:, ::2] << np.arange(8)).sum(-1))
    np.testing.assert_array_equal(scale[:, 2] + 256 * scale[:, 3], (three << np.arange(16)).sum(-1))
    assert two.mean() < 1 and 0 < three.mean() < 1
    assert np.all(np.asarray(fmt.within(jnp.asarray(x), q.scales, None)))
    assert not np.all(np.asarray(formats.make("hif4").within(jnp.asarray(x), *published(x))))


def published(x: np.ndarray) -> tuple[jax.Array, None]:
    """The scales of the conversion as published, and no outer scale."""
    return fp4rl_jax.quantize(jnp.asarray(x), "hif4").scales, None


@pytest.mark.parametrize("divisor", [4, 6])
def test_block_scales_round_the_exact_quotient(divisor):
    """At and beside every E4M3 midpoint, where a quotient by a folded 1/6 goes astray."""
    middle = (oracle.E4M3[:-1] + oracle.E4M3[1:]) / 2 * divisor
    x = np.stack([np.nextafter(middle.astype(np.float32), d) for d in (0, np.inf)] + [middle], -1)
    x = x.astype(np.float32)
    expected = [[oracle.nearest(v, oracle.E4M3 * divisor, ties="even") for v in row] for row in x]
    log = _bits.from_float(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(_e4m3.round_ratio(log, divisor, to="nearest")), expected)
    up = np.searchsorted(oracle.E4M3 * divisor, x.astype(np.float64))
    np.testing.assert_array_equal(np.asarray(_e4m3.round_ratio(log, divisor, to="up")), up)
    folded = np.asarray(x * np.float32(1 / divisor)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    astray = int((folded != np.asarray(expected)).sum())
    assert astray == {4: 0, 6: 15}[divisor], "why the division must not be folded: 15 of 378 points"


@pytest.mark.parametrize("outer", [None, 2.0**-60, 2.0**90])
def test_nvfp4_inverts_every_code_under_every_scale_byte(outer):
    fmt = formats.make("nvfp4")
    codes = jnp.arange(16, dtype=jnp.uint8)
    scales = jnp.arange(1, 127, dtype=jnp.uint8)[:, None]
    given = None if outer is None else jnp.float32(outer)
    again = encode(fmt)(decode(fmt)(codes, scales, given), scales, given)
    expected = np.where(np.arange(16) == 8, 8, np.arange(16))
    np.testing.assert_array_equal(np.asarray(again), np.broadcast_to(expected, (126, 16)))
    values = np.asarray(decode(fmt)(codes, scales, given))
    exact = oracle.E2M1 * oracle.E4M3[1:, None] * (outer or 1.0)
    np.testing.assert_array_equal(values[:, :8], exact)
    np.testing.assert_array_equal(values[:, 8:], -exact)


@pytest.mark.parametrize("outer", [None, 2.0**-60])
def test_nvfp4_midpoints_go_to_even_under_every_scale_byte(outer):
    fmt = formats.make("nvfp4")
    scale = (oracle.E4M3[1:127] * (outer or 1.0)).astype(np.float32)[:, None, None]
    grid = oracle.E2M1
    middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)[:, None] * scale[:, :, 0][:, None]  # exact
    middle = middle[..., 0]
    x = np.stack([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))], -1)
    _, expected = midpoints(grid, ties="even")
    flat = jnp.asarray(x.reshape(len(x), -1))  # [126, 21]: two blocks under one byte each
    scales = jnp.repeat(jnp.arange(1, 127, dtype=jnp.uint8)[:, None], 2, axis=1)
    given = None if outer is None else jnp.float32(outer)
    for sign, bit in ((1, 0), (-1, 8)):
        codes = np.asarray(encode(fmt)(sign * flat, scales, given))
        wanted = expected.reshape(-1) + np.where(flat[0] == 0, 0, bit)
        np.testing.assert_array_equal(codes, np.broadcast_to(wanted, codes.shape))


def test_mxfp4_inverts_every_code_and_midpoint_under_every_scale_byte():
    fmt = formats.make("mxfp4")
    x, expected = midpoints(oracle.E2M1, ties="even")
    points = np.concatenate([oracle.E2M1, x.reshape(-1)])
    wanted = np.concatenate([np.arange(8), expected.reshape(-1)])
    bytes_ = np.arange(255)[:, None]
    scaled = np.ldexp(points, bytes_ - 127)
    as_float = np.minimum(scaled, 2.0**127).astype(np.float32)
    held = as_float.astype(np.float64) == scaled
    assert held.mean() > 0.98, "all but subnormal neighbours of midpoints and the top binades"
    codes = encode(fmt)(jnp.asarray(np.where(held, as_float, 0)), jnp.asarray(bytes_, jnp.uint8))
    np.testing.assert_array_equal(np.asarray(codes)[held], np.broadcast_to(wanted, held.shape)[held])
    values = np.asarray(
        decode(fmt)(jnp.arange(8, dtype=jnp.uint8), jnp.arange(256, dtype=jnp.uint8)[:, None])
    )
    np.testing.assert_array_equal(values[:252].astype(np.float64), np.ldexp(oracle.E2M1, bytes_[:252] - 127))
    assert np.isnan(values[255]).all() and np.isinf(values[254, 4:]).all()


def hif4_scales() -> tuple[np.ndarray, np.ndarray]:
    """All 255 usable E6M2 bytes with levels 2 + 3 of 0, 1 and 2: bytes [765, 4], scale [765]."""
    bytes_, scale = [], []
    for byte in range(255):
        e6m2 = 2.0 ** ((byte >> 2) - 48) * (1 + (byte & 3) / 4)
        for two, three in ((0, 0), (0xFF, 0), (0xFF, 0xFF)):
            bytes_.append([byte, two, three, three])
            scale.append(e6m2 * 2.0 ** bool(two) * 2.0 ** bool(three))
    return np.array(bytes_, np.uint8), np.array(scale)


def test_hif4_inverts_every_code_under_every_scale():
    fmt = formats.make("hif4")
    scales, scale = hif4_scales()
    codes = jnp.arange(16, dtype=jnp.uint8)
    values = np.asarray(decode(fmt)(codes, jnp.asarray(scales)))
    np.testing.assert_array_equal(values[:, :8], oracle.S1P2 * scale[:, None])
    np.testing.assert_array_equal(values[:, 8:], -oracle.S1P2 * scale[:, None])
    again = np.asarray(encode(fmt)(jnp.asarray(values), jnp.asarray(scales)))
    np.testing.assert_array_equal(again[:, 1:8], np.broadcast_to(np.arange(1, 8), (765, 7)))
    np.testing.assert_array_equal(again[:, 9:], np.broadcast_to(np.arange(9, 16), (765, 7)))
    assert not (again[:, [0, 8]] & 7).any()


def test_hif4_rounds_half_away_through_its_bfloat16_reciprocal():
    """At, below and above every midpoint of |x| * bf16(1 / E6M2), as exact rationals."""
    fmt = formats.make("hif4")
    scales, _ = hif4_scales()
    reciprocal = np.array([1.0, 0.80078125, 0.66796875, 0.5703125])
    byte = scales[:, 0].astype(int)
    levels = (scales[:, 1] > 0).astype(int) + (scales[:, 2] > 0)
    unit = np.ldexp(1.0 / reciprocal[byte & 3], (byte >> 2) - 48 + levels)  # x of code 4, float64
    middle = ((np.arange(7) + 0.5) / 4 * unit[:, None]).astype(np.float32)
    x = np.stack([np.nextafter(middle, np.float32(d)) for d in (0, np.inf)] + [middle], -1)
    exact = x.astype(np.float64) * np.ldexp(reciprocal[byte & 3], 48 - (byte >> 2) - levels)[:, None, None]
    expected = np.minimum(np.floor(exact * 4 + 0.5), 7).reshape(len(x), -1)
    assert (exact[..., 2] * 8 % 2 == 1).sum() > 700, "true ties are among them"
    codes = np.asarray(encode(fmt)(jnp.asarray(x.reshape(len(x), -1)), jnp.asarray(scales)))
    np.testing.assert_array_equal(codes, expected)


def test_fp8_inverts_every_code_and_rounds_ties_to_even():
    fmt = formats.make("fp8_e4m3")
    none = jnp.zeros((0,), jnp.uint8)
    codes = jnp.array([c for c in range(256) if c & 127 != 127], jnp.uint8)
    for scale in (1.0, 2.0**-100, 0.3, 1e30):
        value = decode(fmt)(codes, none, jnp.full((1,), scale, jnp.float32))
        again = np.asarray(encode(fmt)(value, none, jnp.full((1,), scale, jnp.float32)))
        np.testing.assert_array_equal(again, np.asarray(codes))
    x, expected = midpoints(oracle.E4M3, ties="even")
    codes = encode(fmt)(jnp.asarray(x.reshape(-1)), none, jnp.ones(1))
    np.testing.assert_array_equal(np.asarray(codes), expected.reshape(-1))


def test_hif4_exact_vector():
    """By hand: b_k = (k - 31.5) / 8 has SF .5625, E6M2 .5 (byte 188), block MSE .0205078125."""
    fmt = formats.make("hif4")
    b = jnp.asarray((np.arange(64) - 31.5) / 8, jnp.float32)
    scales = fmt.choose_scales(b, _bits.block_amax(b)[None], None)
    assert int(scales[0]) == 188
    value = np.asarray(decode(fmt)(encode(fmt)(b, scales), scales))
    np.testing.assert_array_equal(value[:14], [-3.5] * 6 + [-3.0] * 4 + [-2.5] * 4)
    assert np.mean((value - np.asarray(b)) ** 2) == 0.0205078125


def test_mxfp4_exact_vector():
    """By hand: amax = 7 becomes 6 under FLOOR and 8 under RCEIL."""
    x = jnp.zeros(32).at[0].set(7.0)
    for rule, value in (("floor", 6.0), ("rceil", 8.0)):
        fmt = formats.make("mxfp4", scale_rule=rule)
        scales = fmt.choose_scales(x, _bits.block_amax(x)[None], None)
        assert float(decode(fmt)(encode(fmt)(x, scales), scales)[0]) == value


def test_a_static_scale_of_fp8_is_the_smallest_power_of_two_that_clips_nothing():
    """By hand about 448 = 1.75 * 2^8, and that every finite magnitude is held by no more than a binade."""
    fmt = formats.make("fp8_e4m3", outer="static")
    values = np.float32(
        [0, 448, np.nextafter(np.float32(448), np.float32(449)), 1.75, 1.751, 3.0, 6.0, 2.0**-140]
    )
    scale = np.asarray(fmt.outer_from_amax(_bits.raw(jnp.asarray(values))))
    np.testing.assert_array_equal(scale, np.exp2([0, 0, 1, -8, -7, -7, -6, -126]))
    random = np.float32(np.exp2(np.random.default_rng(0).uniform(-100, 100, 4096)))
    held = 448 * np.asarray(fmt.outer_from_amax(_bits.raw(jnp.asarray(random))), np.float64) / random
    assert held.min() >= 1 and held.max() < 2
