"""The Blackwell kernel: layouts of its operands, its body with dense MMAs in the interpreter, its choice.

Block-scaled MMAs run nowhere here: they are compiled for sm_100a where the CUDA wheels are (last test).
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mosaic_utils

from fp4rl_jax import formats as project_formats
from pallas_kernels import formats
from pallas_kernels.dispatch import Facts, UnsupportedError
from pallas_kernels.packed_matmul import IMPLS, blackwell, packed_matmul, reference, select, sm100
from pallas_kernels.packed_matmul import block_scaled as bs
from pallas_kernels.packed_matmul.sm100 import Config, impossible
from pallas_kernels.quantize import Task, quantize
from pallas_kernels.testing import UNIT
from tests import ahead_of_time

ROOT = Path(__file__).parent.parent.parent
CODED = tuple(bs.SCALE_DTYPES)
B200 = dict(platform="gpu", capability=(10, 0))


def compiled(fn, *static, **kwargs):
    return jax.jit(functools.partial(fn, **kwargs), static_argnums=static)


@functools.cache
def weight(name: str, n: int, k: int):
    """Random codes, scale bytes that take every value that can be packed, and the packed stream."""
    rng = np.random.default_rng(n + k)
    fmt = formats.FORMATS[name]
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    values = {"nvfp4": np.arange(0x7F), "mxfp4": np.arange(100, 227), "hif4": np.arange(0xFF)}[name]
    blocks = (n, k // fmt.BLOCK)
    first = rng.permutation(np.resize(values, blocks)).reshape(*blocks, 1)
    rest = rng.integers(0, 256, (*blocks, fmt.SCALE_WIDTH - 1))
    scales = np.concatenate([first, rest], axis=-1).reshape(n, -1).astype(np.uint8)
    packed, unit = compiled(formats.pack, 2)(codes, scales, name)
    return codes, scales, packed, unit.reshape(1)


def tokens(name: str, m: int, k: int, seed: int = 0) -> bs.Coded:
    """Quantized normal rows."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((m, k)), jnp.float32)
    task = Task(fmt=name, outer="row" if name == "nvfp4" else "none", codes=True)
    facts = Facts(platform="cpu")
    q = compiled(quantize, task=task, facts=facts)(x)
    return bs.Coded(q.packed, q.scales, q.outer)


# ---- layouts ----------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(128, 4), (384, 20), (100, 6)])
def test_scales_lie_where_the_formula_says(shape):
    rows, columns = (-(-size // tile) * tile for size, tile in zip(shape, (128, 4), strict=True))
    scales = np.random.default_rng(0).permutation(rows * columns)[: shape[0] * shape[1]].reshape(shape)
    tiles = np.asarray(bs.swizzled(jnp.asarray(scales)))
    assert tiles.shape == (rows // 128, columns // 4, 32, 16)
    r, c = np.indices(shape)
    formula = (((r // 128) * (columns // 4) + c // 4) * 32 + r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    np.testing.assert_array_equal(tiles.reshape(-1)[formula], scales)
    assert tiles.sum() == scales.sum()  # zeros elsewhere
    written = np.vectorize(bs.scale_offset)(r, c, columns)
    np.testing.assert_array_equal(written, formula)
    np.testing.assert_array_equal(bs.unswizzled(jnp.asarray(tiles))[: shape[0], : shape[1]], scales)


@pytest.mark.parametrize("name", CODED)
def test_a_weight_in_blackwell_s_layout_is_the_weight(name):
    codes, scales, packed, unit = weight(name, 192, 768)
    got, tiles = compiled(bs.to_blackwell, 1)(packed, name)
    rows = np.asarray(bs.unswizzled(tiles))[:192]
    block = formats.FORMATS[name].BLOCK
    filled = np.repeat(scales != 0, block, axis=1) | (name != "nvfp4")  # NVFP4 packs 0 under scale 0
    np.testing.assert_array_equal(bs.unpacked_codes(got), np.where(filled, codes, 0))
    if name == "nvfp4":
        np.testing.assert_array_equal(rows, scales)
    else:
        np.testing.assert_array_equal(rows.astype(int) - scales, 128 - int(scales.max()))
    values = np.asarray(bs.values(bs.Coded(got, jnp.asarray(rows)), name), np.float32)
    decoded = np.asarray(compiled(formats.decode, 1)(packed, name), np.float32)
    np.testing.assert_array_equal(values * np.float32(bs.DECODED_OVER_CODED[name]), decoded)
    np.testing.assert_array_equal(compiled(bs.from_blackwell, 2)(got, tiles, name), packed)


def test_empty_mxfp4_blocks_far_below_the_largest_stay_empty():
    codes, scales = np.ones((64, 256), np.uint8), np.full((64, 8), 226, np.uint8)
    codes[3, 32:64], scales[3, 1] = 8, 20  # minus zero under 2^-107
    packed, _ = compiled(formats.pack, 2)(codes, scales, "mxfp4")
    got, tiles = compiled(bs.to_blackwell, 1)(packed, "mxfp4")
    assert np.asarray(bs.unswizzled(tiles))[3, 1] == 0
    back = compiled(bs.from_blackwell, 2)(got, tiles, "mxfp4")
    decoded = [np.asarray(compiled(formats.decode, 1)(p, "mxfp4"), np.float32) for p in (packed, back)]
    np.testing.assert_array_equal(*decoded)


@pytest.mark.parametrize("name", CODED)
def test_code_times_scale_is_the_format_s_value(name):
    scales = np.arange(*{"nvfp4": (0, 0x7F), "mxfp4": (2, 0xFD)}[name], dtype=np.uint8)  # normal products
    block = formats.FORMATS[name].BLOCK
    codes = np.tile(np.arange(16, dtype=np.uint8), (scales.size, 256 // 16))
    bytes_ = np.repeat(scales[:, None], 256 // block, axis=1)

    @jax.jit
    def both(codes, bytes_):
        expected = formats.order_k(project_formats.make(name).inner(codes, bytes_), name)
        return bs.values(bs.Coded(bs.packed_codes(codes), bytes_), name).astype(jnp.float32), expected

    np.testing.assert_array_equal(*both(codes, bytes_))


def test_two_codes_a_byte_are_float4_low_nibble_first():
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    as_values = np.asarray(bs.as_float4(codes)).astype(np.float32)
    np.testing.assert_array_equal(as_values, bs.code_values(bs.unpacked_codes(codes)))


def test_scales_of_a_tile_of_tokens_begin_a_tile_of_128():
    config = Config(mma="block_scaled", tile_m=32)
    scales = jnp.arange(96 * 8, dtype=jnp.int32).reshape(96, 8)
    tiles = bs.unswizzled(sm100.token_scales(scales, config)).reshape(3, 128, 8)
    np.testing.assert_array_equal(tiles[:, :32].reshape(96, 8), scales)
    assert not tiles[:, 32:].any()


# ---- the operation with codes -----------------------------------------------------------------
def bound(x, residual, packed, row_scale, scale, name, extra=3):
    """The distance of two float32 sums of the same exact products (Higham 2002, 4.2) and their scales."""
    w = np.abs(np.asarray(compiled(formats.decode, 1)(packed, name), np.float64))
    size, terms = 0, extra
    for term in (x, residual):
        if term is not None:
            value, outer = bs.multiplied(term, name)
            part = np.abs(np.asarray(value, np.float64)) @ w[:, : value.shape[1]].T
            size = size + part * (1 if outer is None else np.asarray(outer, np.float64)[:, None])
            terms += value.shape[1]
    return 2 * terms * UNIT * size * np.asarray(row_scale, np.float64)[:, None] * float(scale[0])


def call(name: str, m: int, k: int, residual_k: int):
    x = tokens(name, m, k)
    residual = tokens(name, m, residual_k, seed=1) if residual_k else None
    _, _, packed, unit = weight(name, 192, 768)
    row_scale = jnp.asarray(2.0 ** np.random.default_rng(2).integers(-2, 3, m), jnp.float32)
    return (x, packed, row_scale, unit), dict(fmt=name, residual=residual, out_dtype=jnp.float32)


@pytest.mark.fast_cases("nvfp4")
@pytest.mark.parametrize("name", CODED)
def test_codes_multiply_as_their_values(name):
    args, kwargs = call(name, 5, 768, 256)
    x, residual = args[0], kwargs["residual"]
    facts = Facts(platform="cpu", m=5, n=192, k=768, x_dtype=name, w_dtype=name)
    got = {
        impl: compiled(packed_matmul, facts=facts, impl=impl, **kwargs)(*args)
        for impl in ("xla", "reference")
    }
    decoded = dict(kwargs, residual=None)
    plain = [compiled(reference.matmul, **decoded)(bs.values(x, name), *args[1:])]
    w = compiled(formats.decode, 1)(args[1], name)
    second = jnp.dot(bs.values(residual, name), w[:, :256].T, preferred_element_type=jnp.float32)
    plain.append(second * (args[2][:, None] * args[3][0]))
    outer = [np.ones(5) if t.outer is None else np.asarray(t.outer, np.float64) for t in (x, residual)]
    expected = sum(np.asarray(p, np.float64) * o[:, None] for p, o in zip(plain, outer, strict=True))
    allowed = bound(x, residual, *args[1:], name)
    for impl, value in got.items():
        assert value.dtype == jnp.float32 and value.shape == (5, 192)
        assert (np.abs(np.asarray(value, np.float64) - expected) <= allowed).all(), impl


def test_codes_of_another_shape_or_format_are_refused():
    args, _ = call("nvfp4", 5, 768, 0)
    run = functools.partial(packed_matmul, facts=Facts(platform="cpu", x_dtype="nvfp4"), fmt="nvfp4")
    x, rest = args[0], args[1:]
    with pytest.raises(ValueError, match=r"scales \[m, k / 16\], got uint8 \(5, 384\) and uint8 \(5, 24\)"):
        run(x._replace(scales=x.scales[:, ::2]), *rest)
    with pytest.raises(ValueError, match=r"outer scales are \[5\], got \(4,\)"):
        run(x._replace(outer=x.outer[:4]), *rest)
    with pytest.raises(ValueError, match=r"fill up to \[m, 768\].*got \(5, 512\)"):
        run(bs.Coded(x.codes[:, :256], x.scales[:, :32]), *rest)
    with pytest.raises(ValueError, match="facts.x_dtype 'nvfp4'.*'bfloat16'"):
        run(x, *rest, facts=Facts(platform="cpu"))
    with pytest.raises(ValueError, match="both codes or neither"):
        run(x, *rest, residual=jnp.zeros((5, 128), jnp.bfloat16))
    with pytest.raises(ValueError, match="codes are multiplied in nvfp4, mxfp4, got 'hif4'"):
        bs.check_coded(x, "hif4")
    with pytest.raises(ValueError, match="block-scaled MMAs have nvfp4, mxfp4, got 'hif4'"):
        bs.to_blackwell(args[1], "hif4")


# ---- the kernel's body with dense MMAs ---------------------------------------------------------
def interpreted(args, kwargs, **more):
    params = plgpu.InterpretGPUParams()
    return np.asarray(compiled(blackwell.matmul, interpret=params, **kwargs, **more)(*args), np.float64)


def decoded_call(name: str, m: int, n: int, k: int, residual_k: int = 0):
    rng = np.random.default_rng(m)
    _, _, packed, unit = weight(name, n, k)
    x, residual = (
        formats.order_k(jnp.asarray(rng.standard_normal((m, columns)), jnp.bfloat16), name)
        if columns
        else None
        for columns in (k, residual_k)
    )
    row_scale = jnp.asarray(2.0 ** rng.integers(-2, 3, m), jnp.float32)
    return (x, packed, row_scale, unit), dict(fmt=name, residual=residual, out_dtype=jnp.float32)


@pytest.mark.fast_cases("nvfp4-5-64-256-128")
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "residual_k"),
    [
        ("nvfp4", 5, 64, 256, 128),
        ("mxfp4", 16, 192, 512, 256),
        ("hif4", 40, 256, 512, 0),
        ("hif4", 9, 64, 256, 256),
    ],
)
def test_the_body_in_the_interpreter(name, m, n, k, residual_k):
    args, kwargs = decoded_call(name, m, n, k, residual_k)
    expected = np.asarray(compiled(reference.matmul, **kwargs)(*args), np.float64)
    allowed = bound(args[0], kwargs["residual"], *args[1:], name)
    assert (np.abs(interpreted(args, kwargs) - expected) <= allowed).all()


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("stages", [2, 5])
def test_sums_of_their_own_in_the_interpreter(stages):
    rng = np.random.default_rng(0)
    w, x, r = (
        jnp.asarray(rng.integers(-4, 5, shape), jnp.bfloat16) for shape in ((128, 256), (16, 256), (16, 128))
    )
    by_row = [jnp.asarray(2.0 ** rng.integers(-3, 4, 16), jnp.float32) for _ in range(2)]
    run = compiled(
        sm100.matmul,
        fmt="nvfp4",
        config=Config(mma="dense", tile_m=8, tile_k=64, stages=stages),
        out_dtype=jnp.float32,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    scale = jnp.full(1, 0.5, jnp.float32)
    got = run((w,), (x,), by_row[0], scale, residual=(r,), residual_scale=by_row[1])
    w, x, r = (np.asarray(v, np.float64) for v in (w, x, r))
    first, second = (np.asarray(v)[:, None] for v in by_row)
    np.testing.assert_array_equal(got, (x @ w.T * first + r @ w[:, :128].T * second) * 0.5)  # integers


# ---- choices ----------------------------------------------------------------------------------
def test_auto_passes_over_what_was_never_run():
    unverified = "never run on its hardware (verified_on is empty)"
    for name, x_dtype in (("sm100", "nvfp4"), ("sm100_decoded", "bfloat16")):
        facts = Facts(**B200, m=8, n=8192, k=8192, x_dtype=x_dtype, w_dtype="nvfp4")
        choice = select(facts)
        assert choice.impl.name == "xla"
        assert dict(choice.passed_over)[name] == unverified
        assert select(facts, name).impl.name == name
    assert [impl.verified_on for impl in IMPLS if impl.name.startswith("sm100")] == [(), ()]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("sm100", dict(capability=(9, 0)), r"10\.0, got gpu \(9, 0\)"),
        ("sm100_decoded", dict(platform="cpu", capability=None, x_dtype="bfloat16"), r"10\.0, got cpu None"),
        ("sm100", dict(capability=(12, 0)), r"10\.0, got gpu \(12, 0\)"),
        ("sm100", dict(w_dtype="hif4"), r"needs a packed weight in \('nvfp4', 'mxfp4'\), got hif4"),
        ("sm100", dict(x_dtype="bfloat16"), "codes of the weight's format nvfp4, got bfloat16"),
        ("sm100_decoded", dict(x_dtype="nvfp4"), "bfloat16 activations, got nvfp4"),
        ("sm100_decoded", dict(x_dtype="bfloat16", w_dtype="int4"), "got int4"),
        ("sm100", dict(order="fixed"), "order is 'fixed'"),
        ("sm100", dict(n=96), "n=96"),
        ("sm100", dict(k=576), "k=576"),
    ],
)
def test_a_named_kernel_refuses_with_the_number(name, change, reason):
    facts = dict(**B200, m=8, n=8192, k=8192, x_dtype="nvfp4", w_dtype="nvfp4") | change
    with pytest.raises(UnsupportedError, match=reason):
        select(Facts(**facts), name)


@pytest.mark.parametrize("m", [1, 8, 33, 128, 129, 4096])
@pytest.mark.parametrize("coded", [True, False], ids=["codes", "decoded"])
def test_every_call_has_a_possible_config(m, coded):
    for name in CODED if coded else formats.FORMATS:
        for residual_k, sums in ((0, 1), (1024, 1), (1024, 2 if coded else 1)):
            sizes = dict(fmt=name, coded=coded, residual_k=residual_k, sums=sums)
            config = blackwell.config_for(m, 576, 1536, **sizes)
            assert config is not None and config.blocks == (1 if m <= 128 else 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(tile_m=12), "multiple of 8 up to 256 that divides m=512, got 12"),
        (dict(tile_m=8, blocks=2), "multiple of 32"),
        (dict(blocks=3), "one block or two and at least two stages, got 3"),
        (dict(tile_k=128), "multiple of 256 that divides k=4096 and 4096, got 128"),
        (dict(tile_m=256), "takes 592 columns of tensor memory"),
        (dict(stages=9), "bytes of shared memory"),
    ],
)
def test_impossible_configs_say_why(change, reason):
    config = Config(**(dict(mma="block_scaled") | change))
    found = impossible(config, "nvfp4", m=512, n=512, k=4096, residual_k=4096, sums=2)
    assert found is not None and reason in found
    assert "got hif4" in (impossible(Config(mma="block_scaled"), "hif4", m=512, n=512, k=4096) or "")
    assert "n=384" in (
        impossible(Config(mma="dense", blocks=2, tile_k=64), "hif4", m=512, n=384, k=4096) or ""
    )


# ---- a Blackwell GPU --------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(("m", "residual_k"), [(5, 256), (128, 0), (300, 512)])
def test_block_scaled_products_on_a_gpu(name, m, residual_k):
    capability = jax.devices()[0].compute_capability
    if capability != "10.0":
        pytest.skip(f"needs a GPU of compute capability 10.0, this one has {capability}")
    args, kwargs = call(name, m, 768, residual_k)
    facts = Facts(**B200, m=m, n=192, k=768, x_dtype=name, w_dtype=name)
    got = np.asarray(compiled(packed_matmul, facts=facts, impl="sm100", **kwargs)(*args), np.float64)
    expected = np.asarray(compiled(reference.matmul, **kwargs)(*args), np.float64)
    assert (np.abs(got - expected) <= bound(args[0], kwargs["residual"], *args[1:], name)).all()


# ---- compiling --------------------------------------------------------------------------------
def test_block_scaled_operations_lower_for_blackwell(monkeypatch):
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: (10, 0))
    for name, m in (("nvfp4", 5), ("mxfp4", 300)):
        args, kwargs = call(name, m, 768, 256)
        run = jax.jit(functools.partial(blackwell.matmul, fmt=name))
        text = run.trace(*args, residual=kwargs["residual"]).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text


@pytest.mark.slow
@pytest.mark.skipif(ahead_of_time.missing() is not None, reason=str(ahead_of_time.missing()))
def test_programs_compile_for_sm_100a_with_block_scaled_instructions(tmp_path):
    out = tmp_path / "record.json"
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    script = [sys.executable, "benchmarks/kernels_aot.py", "--out", str(out)]
    subprocess.run(script, cwd=ROOT, env=environment, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 36
    for row in rows:
        name, found = row["program"], set(row["instructions"])
        pair = "blocks=2" in name or "m=300" in name
        group = f"tcgen05.mma.cta_group::{2 if pair else 1}"
        vector = "4X" if "nvfp4" in name else "2X"
        mma = f"{group}.kind::mxf4nvf4.block_scale.scale_vec::{vector}"
        if "hif4" in name:
            mma = f"{group}.kind::f16"
        assert mma in found and len([i for i in found if ".mma." in i]) == 1, row
        assert row["target"] == "sm_100a" and row["spilled_bytes"] == 0, row
