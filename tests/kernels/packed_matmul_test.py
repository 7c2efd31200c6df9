"""The packed matmul: implementations against their meaning, the choice of configs, lowering for CUDA.

The Hopper kernel runs in Pallas's interpreter here; on a GPU, `benchmarks/kernels.py check` runs it.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import formats
from pallas_kernels.dispatch import Facts, UnsupportedError
from pallas_kernels.packed_matmul import packed_matmul, reference, select, sm90, tuning
from pallas_kernels.packed_matmul.config import Config, impossible, padded_m
from pallas_kernels.testing import UNIT

NAMES = tuple(formats.FORMATS)
H200 = dict(platform="gpu", capability=(9, 0))


def operands(name: str, m: int, n: int, k: int, residual_k: int = 0, seed: int = 0):
    """Arguments of `reference.matmul` and its keyword arguments."""
    rng = np.random.default_rng(seed)
    fmt = formats.FORMATS[name]
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    limits = {"nvfp4": (0, 0x7F), "mxfp4": (100, 140), "hif4": (0, 0xFF)}[name]
    scales = rng.integers(*limits, (n, -(-k // fmt.BLOCK) * fmt.SCALE_WIDTH)).astype(np.uint8)
    packed, unit = jax.jit(formats.pack, static_argnums=2)(codes, scales, name)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    x = jax.jit(formats.order_k, static_argnums=1)(x, name)
    residual = jnp.asarray(rng.standard_normal((m, residual_k)), jnp.bfloat16) if residual_k else None
    row_scale = jnp.asarray(2.0 ** rng.integers(-3, 4, m), jnp.float32)
    return (x, packed, row_scale, unit.reshape(1)), dict(fmt=name, residual=residual, out_dtype=jnp.float32)


def compiled(fn, **kwargs):
    return jax.jit(functools.partial(fn, **kwargs))


def assert_close(got, args, kwargs):
    """Within the distance of two float32 sums of the same exact products (Higham 2002, 4.2)."""
    x, packed, row_scale, scale = args
    w = np.abs(np.asarray(jax.jit(formats.decode, static_argnums=1)(packed, kwargs["fmt"]), np.float64))
    size, residual = np.abs(np.asarray(x, np.float64)) @ w.T, kwargs["residual"]
    terms = x.shape[1]
    if residual is not None:
        size += np.abs(np.asarray(residual, np.float64)) @ w[:, : residual.shape[1]].T
        terms += residual.shape[1]
    bound = 2 * (terms + 3) * UNIT * size * np.asarray(row_scale, np.float64)[:, None] * float(scale[0])
    expected = np.asarray(compiled(reference.matmul, **kwargs)(*args), np.float64)
    assert got.shape == expected.shape and got.dtype == jnp.float32
    assert (np.abs(np.asarray(got, np.float64) - expected) <= bound).all()


def interpreted(args, kwargs, config: Config):
    return compiled(sm90.matmul, config=config, interpret=plgpu.InterpretGPUParams(), **kwargs)(*args)


@pytest.mark.fast_cases("xla-nvfp4")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_implementations_match_the_reference(name, impl):
    args, kwargs = operands(name, 5, 64, 576 if name == "nvfp4" else 512, residual_k=256)
    facts = Facts(platform="cpu", m=5, n=64, k=args[0].shape[1], w_dtype=name)
    assert_close(compiled(packed_matmul, facts=facts, impl=impl, **kwargs)(*args), args, kwargs)


def test_the_kernel_in_the_interpreter():
    args, kwargs = operands("nvfp4", 8, 64, 256)
    config = Config(groups=1, tile_m=8, tile_k=128, stages=2)
    assert_close(interpreted(args, kwargs, config), args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "residual_k"),
    [
        ("nvfp4", Config(groups=2, tile_m=16, tile_k=128, stages=2, segments=2), 128),
        ("mxfp4", Config(groups=1, tile_m=8, tile_k=256, stages=2), 0),
        ("hif4", Config(groups=1, tile_m=8, tile_k=256, stages=2), 256),
    ],
)
def test_every_format_in_the_interpreter(name, config, residual_k):
    args, kwargs = operands(name, 16, 128, 512, residual_k)
    assert_close(interpreted(args, kwargs, config), args, kwargs)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([8, 24]),
    st.booleans(),
)
def test_drawn_shapes_in_the_interpreter(name, tiles_m, groups, steps, tile_m, both):
    tile_k = max(128, formats.FORMATS[name].BLOCK_K)
    m, n, k = tiles_m * tile_m, groups * 64, steps * tile_k
    args, kwargs = operands(name, m, n, k, tile_k if both else 0, seed=m + n + k)
    config = Config(groups=groups, tile_m=tile_m, tile_k=tile_k, stages=2)
    assert_close(interpreted(args, kwargs, config), args, kwargs)


@pytest.mark.slow
def test_sums_of_parts_do_not_depend_on_who_adds_them():
    args, kwargs = operands("nvfp4", 16, 64, 512)
    side_by_side = interpreted(args, kwargs, Config(groups=1, tile_m=16, tile_k=128, stages=2, splits=2))
    in_turn = interpreted(args, kwargs, Config(groups=1, tile_m=16, tile_k=128, stages=3, segments=2))
    np.testing.assert_array_equal(np.asarray(side_by_side), np.asarray(in_turn))


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_nan_stays_in_its_row(impl):
    args, kwargs = operands("nvfp4", 4, 64, 128)
    x = args[0].at[2, 7].set(jnp.nan)
    facts = Facts(platform="cpu", m=4, n=64, k=128, w_dtype="nvfp4")
    out = np.asarray(compiled(packed_matmul, facts=facts, impl=impl, **kwargs)(x, *args[1:]))
    np.testing.assert_array_equal(np.isnan(out).all(axis=1), [False, False, True, False])
    assert np.isnan(out).sum() == 64


# ---- choices ----------------------------------------------------------------------------------
SHAPES = ((28672, 8192), (8192, 28672), (4096, 4096), (6144, 4096), (64, 640), (576, 1536), (192, 256))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", [1, 16, 33, 64, 128, 200, 4096])
def test_every_call_has_a_possible_config(shape, m):
    for choose in (tuning.config_for, tuning.fixed_config_for):
        config = choose(m, *shape, fmt="nvfp4")
        assert config is not None
        assert impossible(config, "nvfp4", m=padded_m(m, config), n=shape[0], k=shape[1]) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fixed_order_is_a_function_of_n_and_k(shape):
    parts = {tuning.fixed_config_for(m, *shape, fmt="nvfp4").parts() for m in (1, 8, 64, 65, 1000, 4096)}
    assert parts == {tuning.parts_for(*shape)}


def test_auto_takes_the_kernel_in_the_free_order_only():
    assert select(Facts(**H200, m=8, n=8192, k=8192, w_dtype="nvfp4")).impl.name == "sm90"
    fixed = select(Facts(**H200, m=8, n=8192, k=8192, w_dtype="nvfp4", order="fixed"))
    assert fixed.impl.name == "reference"
    assert fixed.passed_over[0] == ("sm90", "the fixed order's rows were compared on a GPU up to m=16 only")


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_taken_where_the_format_allows(name):
    for (n, k), entries in tuning.TABLE.items():
        for m, config in entries:
            rows = padded_m(m, config)
            if impossible(config, name, m=rows, n=n, k=k, out_bytes=4) is None:
                assert tuning.config_for(m, n, k, fmt=name, out_bytes=4) == config
    assert tuning.config_for(9000, 8192, 8192, fmt="nvfp4") == tuning.TABLE[8192, 8192][-1][1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(capability=(10, 0)), r"9\.0, got gpu \(10, 0\)"),
        (dict(w_dtype="bfloat16"), "got bfloat16"),
        (dict(x_dtype="float32"), "got float32"),
        (dict(n=96), "n=96"),
        (dict(k=576), "k=576"),
    ],
)
def test_the_kernel_refuses_with_the_number(change, reason):
    facts = Facts(**(dict(**H200, m=8, n=8192, k=8192, w_dtype="nvfp4") | change))
    with pytest.raises(UnsupportedError, match=reason):
        select(facts, "sm90")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(tile_m=12), "got 12"),
        (dict(groups=3), "192"),
        (dict(tile_k=384), "tile_k"),
        (dict(splits=16), "cluster"),
        (dict(splits=2, segments=2), "exclude"),
        (dict(stages=40), "bytes of shared memory"),
        (dict(tile_m=256, groups=4, stages=2, tile_k=128), "registers"),
    ],
)
def test_impossible_configs_say_why(change, reason):
    config = Config(**(dict(groups=2, tile_m=8) | change))
    found = impossible(config, "nvfp4", m=max(config.tile_m, 24), n=8192, k=8192)
    assert found is not None and reason in found


# ---- lowering ---------------------------------------------------------------------------------
def lowered(name: str, config: Config, residual_k: int = 0) -> str:
    n, k = 64 * config.groups * config.share * 2, config.tile_k * config.parts() * 2
    shapes = jax.eval_shape(lambda: operands(name, config.tile_m, n, k, residual_k)[0])
    residual = jax.ShapeDtypeStruct((config.tile_m, residual_k), jnp.bfloat16) if residual_k else None

    def run(args, residual):
        return sm90.matmul(*args, fmt=name, config=config, residual=residual)

    return jax.jit(run).trace(shapes, residual).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_lowers_for_cuda(name):
    assert "mosaic_gpu" in lowered(name, Config(groups=1, tile_m=16, stages=3), residual_k=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Config(groups=4, tile_m=8, splits=4),
        Config(groups=2, tile_m=32, share=2),
        Config(groups=2, tile_m=64, splits=2, share=2, stages=3),
        Config(groups=2, tile_m=128, segments=4, tile_k=128),
        Config(groups=2, tile_m=256, tile_k=128, stages=2),
        *sorted({config for entries in tuning.TABLE.values() for _, config in entries}, key=repr)[::4],
    ],
)
def test_every_kind_of_config_lowers_for_cuda(config):
    assert "mosaic_gpu" in lowered("nvfp4", config)
