"""NVFP4 weights: E2M1 codes under an E4M3 scale for each 16, packed at 4.5 bits a weight.

A scale byte is re-encoded with five exponent bits and no sign (`ue5m3`): every positive E4M3 value,
subnormals included, becomes a normal number, and (byte << 4) | 0x7000 are the bits of
bfloat16(scale * 2^107). A code at a bfloat16's bits 15 and 8..6 is value * 2^-126 (0.5 is a
subnormal), so one product gives value * scale * 2^-19, exactly; `unit` undoes the power of two.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_kernels.formats import _words
from pallas_kernels.formats._words import CODE_LAYOUT, SCALE_LAYOUT, TILE

Array = jax.Array

#: Columns that share a scale; chunks of 64 that a quad's four blocks span; columns of a packed block.
BLOCK, CHUNKS, BLOCK_K = 16, 1, 128
#: Rows of 128 words in a packed block: codes, then scales.
CODE_ROWS, SCALE_ROWS = 8, 1
#: Bytes of scale data that a block has before packing.
SCALE_WIDTH = 1
#: Exponent of the power of two that a decoded weight lacks.
_UNIT = 19

#: What is wrong with a weight that is not `packable`.
NEEDS = "it has a NaN scale, 0x7F"


def packable(codes: Array, scales: Array) -> Array:
    """[] bool: no scale byte is a NaN (0x7F), which five exponent bits would turn into 480."""
    del codes
    return jnp.all((scales & 0x7F) != 0x7F)


def unit(scales: Array) -> Array:
    """[] float32: what a product with decoded weights is multiplied by."""
    del scales
    return jnp.float32(2.0**_UNIT)


def ue5m3(scales: Array) -> Array:
    """E4M3 bytes, not negative -> bytes whose exponent field is E4M3's plus 3, subnormals normalised."""
    byte = scales.astype(jnp.int32)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    normal = ((exponent + 3) << 3) | fraction
    subnormal = jnp.where(
        fraction >= 4,
        (3 << 3) | ((fraction - 4) << 1),
        jnp.where(fraction >= 2, (2 << 3) | ((fraction - 2) << 2), 1 << 3),
    )
    return jnp.where(exponent > 0, normal, jnp.where(fraction == 0, 0, subnormal))


def scale_bytes(byte: Array) -> Array:
    """The inverse of `ue5m3`: int32 E4M3 bytes, subnormals included."""
    exponent, fraction = byte >> 3, byte & 7
    subnormal = (8 | fraction) >> (4 - jnp.minimum(exponent, 4))
    return jnp.where(exponent >= 4, ((exponent - 3) << 3) | fraction, subnormal)


def moved_bytes(scales: Array) -> Array:
    """The inverse of `scale_bytes`: what `pack_words` packs."""
    return ue5m3(scales)


def pack_words(codes: Array, scales: Array) -> tuple[Array, Array]:
    """Codes [N, K] and scale bytes [N, K / 16], uint8, as words.

    Returns:
        uint32 [N / 64, K / 128, 8, 128] of codes and [N / 64, K / 128, 1, 128] of scales.
    """
    shape = (codes.shape[0] // 64, codes.shape[1] // BLOCK_K)
    empty = jnp.repeat(scales == 0, BLOCK, axis=1)  # scale 0 has no byte of its own
    words = _words.e2m1_words(_words.owned(jnp.where(empty, jnp.uint8(0), codes), CHUNKS))
    packed = _words.four_bytes(ue5m3(scales))
    return words.reshape(*shape, CODE_ROWS, 128), packed.reshape(*shape, SCALE_ROWS, 128)


def decode_chunk(chunk: int):
    """(codes, scales) in registers -> the tile in registers; `chunk` of the packed block is static."""

    @plgpu.inline_mgpu(arg_types=(CODE_LAYOUT, SCALE_LAYOUT), return_type=TILE)
    def decode(ctx, codes, scales):
        del ctx
        scale = _words.shifted(_words.word_of(scales), -4 if chunk else 4)
        scale = arith.ori(_words.masked(scale, 0x0FF00FF0), _words.constant(0x70007000))
        return _words.e2m1_tile(codes, scale)

    return decode


def decode_words(codes: Array, scales: Array) -> Array:
    """Words [..., 8, 128] and [..., 1, 128] -> bfloat16 [..., 64, 128], columns as multiplied.

    Exact: the bits that `decode_chunk` leaves in registers.
    """
    byte = _words.unpacked_bytes(scales[..., 0, :])  # [..., 2 chunks, 128, 2 rows]
    bits = (byte << 20) | (0x7000 << 16)  # float32 of scale * 2^107
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32) * jnp.float32(2.0 ** (-107 - _UNIT))
    return _words.e2m1_columns(codes, scale)
