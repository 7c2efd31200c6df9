"""HiF4 weights: signed quarters under three levels of scale for each 64, packed at 4.5 bits a weight.

An element is an integer v in -7..7, in quarters: its nibble is stored as v + 8, so that one mask
leaves bfloat16(136 + v) in a register, and fma(136 + v, s, -136 s) is v * s, exactly: a group's scale
s = E6M2 * 2^(level 2 + level 3) has three significant bits. `unit` is the quarter.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_kernels.formats import _words
from pallas_kernels.formats._words import CODE_LAYOUT, SCALE_LAYOUT, TILE

Array = jax.Array

#: Columns that share a scale; chunks of 64 that a quad's four blocks span; columns of a packed block.
BLOCK, CHUNKS, BLOCK_K = 64, 4, 256
#: Rows of 128 words in a packed block: codes, then scales.
CODE_ROWS, SCALE_ROWS = 16, 2
#: Bytes of scale data that a block has before packing: E6M2, 8 bits of level 2, 16 of level 3.
SCALE_WIDTH = 4
_TWICE_136 = 0xC308C308  # bfloat16 -136, twice

#: What is wrong with a weight that is not `packable`.
NEEDS = "it has a NaN level-1 scale, 0xFF"


def packable(codes: Array, scales: Array) -> Array:
    """[] bool: no level-1 byte is a NaN (0xFF)."""
    del codes
    return jnp.all(scales[..., 0::SCALE_WIDTH] != 0xFF)


def unit(scales: Array) -> Array:
    """[] float32: what a product with decoded weights is multiplied by."""
    del scales
    return jnp.float32(0.25)


def pack_words(codes: Array, scales: Array) -> tuple[Array, Array]:
    """Codes [N, K] (sign in bit 3) and scale bytes [N, K / 64 * 4], uint8, as words.

    A thread's two words of scales hold row g in the low and row g + 8 in the high half: first the
    sixteen level-3 bits, then E6M2 and above it the eight level-2 bits.

    Returns:
        uint32 [N / 64, K / 256, 16, 128] of codes and [N / 64, K / 256, 2, 128] of scales.
    """
    shape = (codes.shape[0] // 64, codes.shape[1] // BLOCK_K)
    nibble = jnp.where(codes & 8, 8 - (codes & 7), 8 + (codes & 7)).astype(jnp.uint8)
    owned = _words.owned(nibble, CHUNKS)  # [..., 2 rows, 2 halves, 2 elements]
    places = ((r, h, e, 8 * h + 4 * r + 16 * e) for r in (0, 1) for h in (0, 1) for e in (0, 1))
    words = functools.reduce(jnp.bitwise_or, (owned[..., r, h, e] << place for r, h, e, place in places))
    one, two, low, high = (_words.by_thread(scales[:, i::SCALE_WIDTH]) for i in range(4))
    by_row = jnp.stack([low | (high << 8), one | (two << 8)], axis=2)  # [N / 64, K / 256, 2, 128, 2]
    packed = by_row[..., 0] | (by_row[..., 1] << 16)
    return words.reshape(*shape, CODE_ROWS, 128), packed


def decode_chunk(chunk: int):
    """(codes, two words of scales) in registers -> the tile in registers; `chunk` of the block is static."""

    @plgpu.inline_mgpu(arg_types=(CODE_LAYOUT, SCALE_LAYOUT, SCALE_LAYOUT), return_type=TILE)
    def decode(ctx, codes, fine, coarse):
        del ctx
        three, two = _words.word_of(fine), _words.word_of(coarse)
        base = _words.shifted(_words.masked(two, 0x00FF00FF), 5)
        base = arith.addi(base, _words.constant(0x27802780))  # E6M2's bias to bfloat16's
        steps = []
        for step, q in enumerate(_words.words_of(codes)):
            group = 4 * chunk + step
            double = _words.masked(_words.shifted(two, -1 - group // 2), 0x00800080)
            again = _words.masked(_words.shifted(three, 7 - group), 0x00800080)
            scale = _words.splat_halves(arith.addi(arith.addi(base, double), again))
            steps.append([_row(q, 4 * row, scale[row]) for row in (0, 1)])
        return _words.tile_of(steps)

    return decode


def _row(q, place: int, scale) -> list:
    """Registers [half] of one row: v * scale."""
    shift = _words.times(scale, _words.constant(_TWICE_136))
    out = []
    for half in (0, 1):
        nibble = _words.masked(_words.shifted(q, -place - 8 * half), 0x000F000F)
        raised = arith.ori(nibble, _words.constant(0x43004300))
        out.append(_words.times_plus(raised, scale, shift))
    return out


def decode_words(codes: Array, scales: Array) -> Array:
    """Words [..., 16, 128] and [..., 2, 128] -> bfloat16 [..., 64, 256], columns as multiplied.

    Exact: the bits that `decode_chunk` leaves in registers.
    """
    lead = codes.shape[:-2]
    q = codes.reshape(*lead, CHUNKS, 128, 4)  # four steps
    nibbles = [[[q >> (8 * h + 4 * r + 16 * e) for e in (0, 1)] for h in (0, 1)] for r in (0, 1)]
    rows = [jnp.stack([jnp.stack(halves, -1) for halves in row], -2) for row in nibbles]
    v = (jnp.stack(rows, -3) & 15).astype(jnp.int32) - 8  # [..., 2 rows, 2 halves, 2 elements]
    by_row = jnp.stack([scales & 0xFFFF, scales >> 16], -1).astype(jnp.int32)  # [..., 2, 128, 2]
    fine, coarse = by_row[..., 0, :, :], by_row[..., 1, :, :]
    group = jnp.arange(16).reshape(CHUNKS, 1, 4, 1)
    exponent = ((fine[..., None, :, None, :] >> group) & 1) + (
        (coarse[..., None, :, None, :] >> (8 + group // 2)) & 1
    )  # [..., 4 chunks, 128, 4 steps, 2 rows]
    base = (coarse[..., None, :, None, :] & 0xFF) << 5
    bits = (base + (79 << 7) + (exponent << 7)) << 16
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    tiles = _words.disowned(v.astype(jnp.float32) * scale[..., None, None])
    return _words.side_by_side(tiles)
