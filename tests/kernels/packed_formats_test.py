"""Packed weights decode to `fp4rl_jax.formats`, bit for bit: every code under every scale byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats
from pallas_kernels import formats as packed_formats

NAMES = tuple(packed_formats.FORMATS)


def every_code_and_scale(name: str, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random codes; scale bytes that take every packable value."""
    rng = np.random.default_rng(seed)
    fmt = packed_formats.FORMATS[name]
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    blocks = -(-k // fmt.BLOCK)
    values = {"nvfp4": np.arange(0x7F), "mxfp4": np.arange(100, 227), "hif4": np.arange(0xFF)}[name]
    first = rng.permutation(np.resize(values, n * blocks)).reshape(n, blocks, 1)
    rest = rng.integers(0, 256, (n, blocks, fmt.SCALE_WIDTH - 1))
    return codes, np.concatenate([first, rest], axis=-1).reshape(n, -1).astype(np.uint8)


def decoded(name: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 weights of the packed stream, columns as the activations' order has them."""
    packed, unit = jax.jit(packed_formats.pack, static_argnums=2)(codes, scales, name)
    weights = jax.jit(packed_formats.decode, static_argnums=1)(packed, name)
    return np.asarray(weights, np.float32) * np.float32(unit)


@pytest.mark.fast_cases("shape0-nvfp4")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(64, 576), (192, 1536), (64, 16)])
def test_decoded_weights_are_those_of_the_format(name, shape):
    codes, scales = every_code_and_scale(name, *shape)
    padding = -shape[1] % packed_formats.FORMATS[name].BLOCK
    whole = np.pad(codes, ((0, 0), (0, padding)))

    @jax.jit
    def ordered(codes, scales):
        expected = formats.make(name).inner(codes, scales)[:, : shape[1]]
        return packed_formats.order_k(expected, name)

    np.testing.assert_array_equal(decoded(name, codes, scales), np.asarray(ordered(whole, scales)))


@pytest.mark.parametrize("name", NAMES)
def test_bits_a_weight(name):
    codes, scales = every_code_and_scale(name, 128, 512)
    packed, _ = packed_formats.pack(jnp.asarray(codes), jnp.asarray(scales), name)
    assert packed.dtype == jnp.uint32
    assert packed.size * 32 / codes.size == formats.make(name).bits_per_value


@pytest.mark.parametrize("name", NAMES)
def test_formats_agree_on_their_blocks(name):
    ours, theirs = packed_formats.FORMATS[name], formats.make(name)
    assert (ours.BLOCK, ours.SCALE_WIDTH) == (theirs.block, theirs.scale_width)


@pytest.mark.parametrize("name", NAMES)
def test_a_poisoned_block_is_refused(name):
    codes, scales = every_code_and_scale(name, 64, 256)
    packed_formats.check_packable(jnp.asarray(codes), jnp.asarray(scales), name)
    scales[3, 0] = formats.make(name).scale_nan
    with pytest.raises(ValueError, match="NaN"):
        packed_formats.check_packable(jnp.asarray(codes), jnp.asarray(scales), name)


def test_mxfp4_blocks_that_underflow_are_refused():
    codes, scales = np.full((64, 256), 1, np.uint8), np.full((64, 8), 200, np.uint8)
    scales[5, 2] = 200 - 126
    packed_formats.check_packable(jnp.asarray(codes), jnp.asarray(scales), "mxfp4")
    scales[5, 2] -= 1
    with pytest.raises(ValueError, match="126 binades below"):
        packed_formats.check_packable(jnp.asarray(codes), jnp.asarray(scales), "mxfp4")
    codes[5, 64:96] = 8  # minus zero is a zero
    packed_formats.check_packable(jnp.asarray(codes), jnp.asarray(scales), "mxfp4")


@pytest.mark.parametrize("name", NAMES)
def test_order_of_columns_is_a_permutation_within_a_packed_block(name):
    block = packed_formats.FORMATS[name].BLOCK_K
    order = np.asarray(packed_formats.order_k(jnp.arange(3 * block), name)).reshape(3, block)
    np.testing.assert_array_equal(np.sort(order, axis=1), np.arange(3 * block).reshape(3, block))


def test_shapes_are_refused_with_their_numbers():
    codes, scales = every_code_and_scale("nvfp4", 96, 128)
    with pytest.raises(ValueError, match=r"\(96, 128\)"):
        packed_formats.pack(jnp.asarray(codes), jnp.asarray(scales), "nvfp4")
    with pytest.raises(ValueError, match=r"K / 128.*\(1, 1, 17, 128\)"):
        packed_formats.unpacked_shape(jnp.zeros((1, 1, 17, 128), jnp.uint32), "nvfp4")
