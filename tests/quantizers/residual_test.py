"""Selections and the second pass: worked by hand, and properties that every selection file must have."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats
from fp4rl_jax.quantizers import Quantizer, residual
from fp4rl_jax.quantizers.residual import ChannelStats, Columns, OutlierClamp, Residual, _base

NVFP4 = Quantizer(formats.make("nvfp4", outer="row"))
MXFP4 = Quantizer(formats.make("mxfp4"))
NAMES = residual.names()


def mask_of(name: str, rows: list[list[float]], **options: object) -> np.ndarray:
    r = jnp.asarray(rows, jnp.float32)
    mask = residual.make(name, **options).mask(r, jnp.zeros_like(r), block=16)
    return np.broadcast_to(np.asarray(mask), r.shape)


def test_two_of_four_keeps_the_largest_and_ties_go_to_the_lower_index() -> None:
    rows = [[1.0, 3.0, -3.0, 2.0, 1.0, 1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 5.0, 2.0, -2.0, 2.0, 3.0]]
    expected = [[0, 1, 1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0, 0, 1]]
    np.testing.assert_array_equal(mask_of("pattern_2_4", rows), np.array(expected, bool))


def test_a_short_last_run_keeps_at_most_two() -> None:
    np.testing.assert_array_equal(
        mask_of("pattern_2_4", [[0, 0, 0, 1, 1, 2, 3.0]])[0, 4:], [False, True, True]
    )


def test_pairs_keep_two_of_four_pairs_by_energy() -> None:
    """Energies 1, 4, 2, 4.25: the second and the fourth; equal energies: the first two."""
    rows = [[1, 0, 0, 2, 1, -1, 2, 0.5], [1, 0, 0, 1, 1, 0, 0, 1.0]]
    expected = [[0, 0, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]]
    np.testing.assert_array_equal(mask_of("pairs_4_8", rows), np.array(expected, bool))


def test_tiles_compete_over_the_whole_call() -> None:
    """33 tokens x 128 channels: two bands of two tiles; the last band has one real row."""
    r = np.zeros((33, 128), np.float32)
    r[0, 0], r[5, 100], r[32, 3] = 2.0, 1.0, 3.0
    mask = mask_of("tiles_32x64", r.tolist())
    expected = np.zeros((33, 128), bool)
    expected[:32, :64] = expected[32:, :64] = True
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
    ("score", "chosen"),
    [("l2", 0), ("max", 1), ("act_max", 2)],
)
def test_blocks_by_each_score(score: str, chosen: int) -> None:
    """Block 0 has the largest energy, block 1 the largest element, block 2 the largest activation."""
    r, x = np.zeros((2, 48), np.float32), np.zeros((2, 48), np.float32)
    r[:, :16], r[0, 20], x[1, 40] = 0.5, 1.5, 9.0  # energies 8 and 2.25
    selection = residual.make("blocks", score=score, scope="call", ratio=0.34)
    assert isinstance(selection, Columns)
    columns = np.asarray(selection.chosen(jnp.asarray(r), jnp.asarray(x), block=16))
    np.testing.assert_array_equal(columns, np.arange(16) + 16 * chosen)


def test_channels_of_each_token_and_ties() -> None:
    r = jnp.asarray([[0.0, 2.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    selection = residual.make("channels", scope="token")
    assert isinstance(selection, Columns)
    np.testing.assert_array_equal(selection.chosen(r, r, block=16), [[1, 3], [0, 1]])


@pytest.mark.parametrize("units", [1, 7, 36, 128, 129])
def test_counting_keeps_what_sorting_keeps(units: int, rng: np.random.Generator) -> None:
    """Many ties, a row of zeros, an infinite score; one row alone as well."""
    scores = rng.integers(0, 5, size=(16, units)).astype(np.float32)
    scores[0], scores[1, -1] = 0.0, np.inf
    for count in sorted({1, max(1, units // 3), units}):
        expected = np.zeros(scores.shape, bool)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, :count]
        np.put_along_axis(expected, order, True, axis=-1)
        np.testing.assert_array_equal(_base.largest(jnp.asarray(scores), count), expected)
        np.testing.assert_array_equal(_base.largest(jnp.asarray(scores[3]), count), expected[3])


@pytest.mark.parametrize("scope", ["call", "token"])
@pytest.mark.parametrize("fmt", [("nvfp4", "row"), ("nvfp4", "tensor"), ("mxfp4", None), ("hif4", "row")])
def test_blocks_quantized_in_place_are_those_quantized_apart(
    fmt: tuple[str, str | None], scope: str, rng: np.random.Generator
) -> None:
    """Q(R_I) of the columns of I alone, put back: same values and outer scales; the last block is ragged."""
    name, outer = fmt
    quantizer = Quantizer(formats.make(name, **({"outer": outer} if outer else {})))
    r = jnp.asarray(rng.normal(size=(9, 200)) * rng.random((9, 200)) ** 3, jnp.float32)
    selection = residual.make("blocks", scope=scope)
    assert isinstance(selection, Columns)
    second = Residual(selection=selection, quantizer=quantizer, order="select_first")
    values, scales = second.of(r, r, dtype=jnp.float32)
    columns = selection.chosen(r, r, block=second.block)
    columns = jnp.broadcast_to(columns, (9, columns.shape[-1]))
    apart, expected = quantizer.inner(jnp.take_along_axis(r, columns, axis=-1), dtype=jnp.float32)
    np.testing.assert_array_equal(values, residual.placed(apart, columns, r.shape))
    np.testing.assert_array_equal(np.asarray(scales), np.asarray(expected))
    assert np.count_nonzero(values)


def test_static_columns_come_from_statistics_of_every_layer() -> None:
    energy = jnp.asarray(np.repeat([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]], 16, axis=1), jnp.float32)
    stats = ChannelStats(energy=energy, residual_max=energy, act_max=energy)
    selection = residual.make("blocks", ratio=0.6)
    assert isinstance(selection, Columns) and selection.needs_columns
    columns = np.asarray(selection.choose(stats, block=16))
    blocks = [[0, 2], [1, 2]]
    np.testing.assert_array_equal(columns, [[16 * b + i for b in row for i in range(16)] for row in blocks])


def test_the_second_pass_by_hand() -> None:
    """NVFP4: 0.3 beside 6 becomes 0.5; its residual -0.2 has the scale 273.07 * 2^-13,
    rounded to 288 (steps of 32 there), and -5.69 of it becomes -6: -6 * 288 / 8192 = -0.2109375.

    MXFP4 floor: 7 saturates to 6; its residual 1 has scale 2^-2 and returns exactly.
    """
    x = jnp.asarray([[6.0, 0.3] + [0.0] * 14], jnp.float32)
    second = Residual(selection=residual.make("dense"), quantizer=NVFP4)
    (a, a_outer), (b, b_outer) = second.split(x, NVFP4, dtype=jnp.float32)
    assert a_outer is not None and b_outer is not None
    np.testing.assert_array_equal((a * a_outer)[0, :3], [6.0, 0.5, 0.0])
    np.testing.assert_array_equal((b * b_outer)[0, :3], [0.0, -6 * 288 / 8192, 0.0])
    assert (float(a_outer[0, 0]), float(b_outer[0, 0])) == (2.0**-8, 2.0**-13)
    x = jnp.asarray([[7.0, -0.2] + [0.0] * 30], jnp.float32)
    parts = Residual(selection=residual.make("dense"), quantizer=MXFP4).split(x, MXFP4, dtype=jnp.float32)
    np.testing.assert_array_equal([part[0][0, :2] for part in parts], [[6.0, 0.0], [1.0, -0.25]])


def test_given_columns_of_what_was_quantized_are_those_of_the_dense_pass(rng: np.random.Generator) -> None:
    """Rollout-ResQ with static channels: S(Q(R)) at the columns, each value as the dense pass has it."""
    x, columns = jnp.asarray(rng.normal(size=(3, 64)), jnp.float32), jnp.asarray([0, 7, 31, 40, 63])
    static = Residual(selection=residual.make("channels"), quantizer=NVFP4)
    _, (taken, outer) = static.split(x, NVFP4, dtype=jnp.float32, columns=columns)
    dense = Residual(selection=residual.make("dense"), quantizer=NVFP4)
    _, (whole, whole_outer) = dense.split(x, NVFP4, dtype=jnp.float32)
    np.testing.assert_array_equal(taken, np.asarray(whole)[:, columns])
    np.testing.assert_array_equal(outer, whole_outer)
    assert static.batch_invariant and np.any(np.asarray(taken) != 0)


def test_a_shared_outer_scale_loses_small_residuals_and_its_own_does_not() -> None:
    """2^-22 of the token's maximum is below the smallest block scale under a shared outer scale."""
    row = [2.0**10] + [0.0] * 15 + [2.0**-7, 2.0**-9 + 2.0**-12] + [0.0] * 14
    x = jnp.asarray([row], jnp.float32)
    own = Residual(selection=residual.make("dense"), quantizer=NVFP4)
    static = Quantizer(formats.make("nvfp4", outer="static"))
    shared = Residual(selection=residual.make("dense"), quantizer=static, outer="shared")
    back = []
    for second in (own, shared):
        _, (values, outer) = second.split(x, NVFP4, dtype=jnp.float32)
        back.append(np.abs(np.asarray(values if outer is None else values * outer))[0, 16:18].max())
    assert back[0] > 0.0 == back[1]


def test_clamping_keeps_the_outlier_whole() -> None:
    """The outlier 100 is clamped to the next largest, 6; the other 94 travel in high precision."""
    x = jnp.asarray([[100.0, 6.0, 0.5] + [0.0] * 13], jnp.float32)
    (a, outer), (rest, none) = OutlierClamp(outliers=1 / 16).split(x, NVFP4, dtype=jnp.float32)
    np.testing.assert_array_equal((a * outer)[0, :4], [6.0, 6.0, 0.5, 0.0])
    np.testing.assert_array_equal(rest[0, :4], [94.0, 0.0, 0.0, 0.0])
    assert none is None


#: What `make test` runs of `test_every_selection`: one of each kind.
FAST = {
    ("pattern_2_4", None, "quantize_first"),
    ("channels", "call", "select_first"),
    ("blocks", "token", "select_first"),
}


def seconds() -> list:
    """Every selection file, in every scope and order that needs no columns."""
    found = []
    for name in NAMES:
        base = residual.make(name)
        scopes = ("call", "token") if isinstance(base, Columns) else (None,)
        for scope in scopes:
            selection = dataclasses.replace(base, scope=scope) if scope else base
            orders = ("quantize_first", "select_first") if scope else ("quantize_first",)
            for order in orders:
                second = Residual(selection=selection, quantizer=NVFP4, order=order)
                marks = () if (name, scope, order) in FAST else pytest.mark.slow
                found.append(pytest.param(second, marks=marks, id=f"{name}-{scope}-{order}"))
    return found


@pytest.mark.parametrize("second", seconds())
def test_every_selection(second: Residual, rng: np.random.Generator) -> None:
    """What it keeps is what it says; error shrinks; alone = among others where that is declared."""
    x = rng.normal(size=(64, 128)).astype(np.float32)
    x[8:] *= 50 * rng.random((56, 128)).astype(np.float32)  # loud neighbours with other favourites

    @jax.jit
    def both(x):
        (a, a_outer), (b, b_outer) = second.split(x, NVFP4, dtype=jnp.float32)
        _, (alone, alone_outer) = second.split(x[:8], NVFP4, dtype=jnp.float32)
        return a * a_outer, b * b_outer, alone * alone_outer

    first, added, alone = map(np.asarray, both(jnp.asarray(x)))
    assert np.mean(added != 0) <= second.kept_share(128) + 1e-6
    before, after = ((x - first) ** 2).sum(), ((x - first - added) ** 2).sum()
    assert after < before
    same = np.array_equal(alone, added[:8])
    assert same == second.batch_invariant
    assert hash(second) == hash(dataclasses.replace(second))


def test_wrong_settings_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="must be in \\(0, 1\\], got 0"):
        residual.make("blocks", ratio=0)
    with pytest.raises(ValueError, match="did you mean 'ratio'"):
        residual.make("blocks", ration=0.5)
    with pytest.raises(ValueError, match="did you mean 'pattern_2_4'"):
        residual.make("patern_2_4")
    with pytest.raises(ValueError, match="order must be 'quantize_first'"):
        Residual(selection=residual.make("dense"), quantizer=NVFP4, order="select_first")
    with pytest.raises(ValueError, match="does not fit a residual format"):
        Residual(selection=residual.make("dense"), quantizer=NVFP4, outer="shared")
    with pytest.raises(ValueError, match="holds no whole unit of 16"):
        residual.make("blocks").kept_share(12, 16)
    static = Residual(selection=residual.make("blocks"), quantizer=NVFP4)
    with pytest.raises(ValueError, match="needs columns"):
        static.split(jnp.ones((2, 32)), NVFP4, dtype=jnp.float32)
