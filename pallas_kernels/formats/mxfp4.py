"""MXFP4 weights: E2M1 codes under an E8M0 scale for each 32, packed at 4.25 bits a weight.

Scale bytes are moved up so that the tensor's largest is 254: the byte is then a bfloat16's exponent
field, and one product with a code's value * 2^-126 gives value * 2^(b - bmax + 1); `unit` undoes it.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.formats import _words
from pallas_kernels.formats._words import CODE_LAYOUT, SCALE_LAYOUT, TILE

Array = jax.Array

#: Columns that share a scale; chunks of 64 that a quad's four blocks span; columns of a packed block.
BLOCK, CHUNKS, BLOCK_K = 32, 2, 256
#: Rows of 128 words in a packed block: codes, then scales.
CODE_ROWS, SCALE_ROWS = 16, 1
#: Bytes of scale data that a block has before packing.
SCALE_WIDTH = 1
#: Binades below the largest scale down to which a decoded weight is a normal bfloat16, hence exact.
EXACT_BINADES = 126

#: What is wrong with a weight that is not `packable`.
NEEDS = "it has a NaN scale, 255, or a block that holds values more than 126 binades below the largest"


def packable(codes: Array, scales: Array) -> Array:
    """[] bool: no scale byte is a NaN (255), and no block that holds a value lies below `EXACT_BINADES`."""
    filled = jnp.any((codes & 7).reshape(*scales.shape, BLOCK) != 0, axis=-1)
    low = filled & (scales < _largest(scales) - EXACT_BINADES)
    return jnp.all(scales != 255) & ~jnp.any(low)


def _largest(scales: Array) -> Array:
    """[] int32: the largest scale byte, at least 2 so that `unit` is no subnormal number."""
    return jnp.maximum(jnp.max(scales).astype(jnp.int32), 2)


def unit(scales: Array) -> Array:
    """[] float32: what a product with decoded weights is multiplied by, 2^(bmax - 128)."""
    return jax.lax.bitcast_convert_type((_largest(scales) - 1) << 23, jnp.float32)


def scale_bytes(byte: Array) -> Array:
    """Packed bytes -> int32 E8M0 bytes of the scales that `decode_words` multiplies by, from 2^-127 on.

    Packed bytes below 126 belong to blocks of zeros, where any scale will do.
    """
    return jnp.maximum(byte - EXACT_BINADES, 0)


def moved_bytes(scales: Array) -> Array:
    """The inverse of `scale_bytes`, where that clips nothing."""
    return scales.astype(jnp.int32) + EXACT_BINADES


def pack_words(codes: Array, scales: Array) -> tuple[Array, Array]:
    """Codes [N, K] and scale bytes [N, K / 32], uint8, as words.

    Returns:
        uint32 [N / 64, K / 256, 16, 128] of codes and [N / 64, K / 256, 1, 128] of scales.
    """
    shape = (codes.shape[0] // 64, codes.shape[1] // BLOCK_K)
    words = _words.e2m1_words(_words.owned(codes, CHUNKS))
    moved = jnp.maximum(scales.astype(jnp.int32) + 254 - _largest(scales), 0)
    packed = _words.four_bytes(moved)
    return words.reshape(*shape, CODE_ROWS, 128), packed.reshape(*shape, SCALE_ROWS, 128)


def decode_chunk(chunk: int):
    """(codes, scales) in registers -> the tile in registers; `chunk` of the packed block is static."""

    @plgpu.inline_mgpu(arg_types=(CODE_LAYOUT, SCALE_LAYOUT), return_type=TILE)
    def decode(ctx, codes, scales):
        del ctx
        scale = _words.shifted(_words.word_of(scales), 7 if chunk < CHUNKS else -1)
        return _words.e2m1_tile(codes, _words.masked(scale, 0x7F807F80))

    return decode


def decode_words(codes: Array, scales: Array) -> Array:
    """Words [..., 16, 128] and [..., 1, 128] -> bfloat16 [..., 64, 256], columns as multiplied.

    Exact: the bits that `decode_chunk` leaves in registers, for weights that are `packable`.
    """
    byte = _words.unpacked_bytes(scales[..., 0, :])  # [..., 2 groups, 128, 2 rows]
    bits = jnp.maximum(byte - 126, 0) << 23  # float32 of 2^(byte - 127) * 2^-126
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return _words.e2m1_columns(codes, jnp.repeat(scale, CHUNKS, axis=-3))
