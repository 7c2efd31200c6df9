"""What the packed formats share: who owns which weight, and bits in registers.

A packed weight is one stream of uint32, [N / 64, K / BLOCK_K, ROWS, 128]: a block holds 64 weight
rows and `BLOCK_K` columns, four rows of 128 words of codes for each 64 columns, then the scales.
Thread t of a warpgroup reads words 4 t .. 4 t + 3 of a chunk's four rows (16 consecutive bytes) and
word t of a row of scales. A word is the eight codes that the thread feeds to one m64nNk16
instruction, of rows g and g + 8 with g = t // 4 of its warp.

Columns are permuted so that lane q = t % 4 of a quad owns a whole scale block: one scale a thread
and weight row. `order_k` gives the activations the same order.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Array = jax.Array

#: Columns of one register tile: what a warpgroup decodes at once.
CHUNK = 64
#: Rows of one packed block, those of a wgmma instruction.
TILE_N = 64

#: Register layouts of the loads: a chunk's codes, and a row of scale words.
CODE_LAYOUT = plgpu.Layout.WG_STRIDED((4, 128), vec_size=4)
SCALE_LAYOUT = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
TILE = plgpu.ShapeDtypeStruct((TILE_N, CHUNK), jnp.bfloat16, layout=plgpu.Layout.WGMMA)


def order_k(x: Array, chunks: int) -> Array:
    """[..., K] -> the same shape, columns in the order of a weight whose scale block spans 16 * chunks.

    Inside 64 * chunks columns (lane q, chunk, step, half, element) becomes (chunk, step, half, q, element).
    """
    *lead, k = x.shape
    split = x.reshape(*lead, k // (CHUNK * chunks), 4, chunks, 4, 2, 2)
    return jnp.moveaxis(split, -5, -2).reshape(*lead, k)


def natural_k(x: Array, chunks: int) -> Array:
    """The inverse of `order_k`."""
    *lead, k = x.shape
    split = x.reshape(*lead, k // (CHUNK * chunks), chunks, 4, 2, 4, 2)
    return jnp.moveaxis(split, -2, -5).reshape(*lead, k)


def owned(codes: Array, chunks: int) -> Array:
    """Codes [N, K] by owner: [N / 64, K / 64, 128 threads, 4 steps, 2 rows, 2 halves, 2 elements] uint32."""
    n, k = codes.shape
    split = codes.reshape(n // 64, 4, 2, 8, k // (CHUNK * chunks), 4, chunks, 4, 2, 2)
    # tile, warp, row half, g, block, q, chunk, step, k half, element
    split = split.transpose(0, 4, 6, 1, 3, 5, 7, 2, 8, 9)
    return split.reshape(n // 64, k // CHUNK, 128, 4, 2, 2, 2).astype(jnp.uint32)


def disowned(values: Array) -> Array:
    """[..., 128 threads, 4 steps, 2 rows, 2 halves, 2 elements] -> [..., 64 rows, 64 ordered columns]."""
    lead = values.shape[:-5]
    split = values.reshape(*lead, 4, 8, 4, 4, 2, 2, 2)  # warp, g, q, step, row half, k half, element
    axes = [len(lead) + i for i in (0, 4, 1, 3, 5, 2, 6)]
    return split.transpose(*range(len(lead)), *axes).reshape(*lead, TILE_N, CHUNK)


def by_thread(scales: Array) -> Array:
    """Scale bytes [N, B], one a block: [N / 64, B / 4, 128 threads, 2 rows] uint32."""
    n, blocks = scales.shape
    split = scales.reshape(n // 64, 4, 2, 8, blocks // 4, 4)  # tile, warp, row half, g, group, q
    return split.transpose(0, 4, 1, 3, 5, 2).reshape(n // 64, blocks // 4, 128, 2).astype(jnp.uint32)


def by_row(byte: Array) -> Array:
    """The inverse of `by_thread`: [N / 64, B / 4, 128 threads, 2 rows] -> [N, B]."""
    tiles, groups = byte.shape[:2]
    split = byte.reshape(tiles, groups, 4, 8, 4, 2)  # warp, g, q, row half
    return split.transpose(0, 2, 5, 3, 1, 4).reshape(tiles * TILE_N, groups * 4)


# ---- the eight codes of a word, E2M1 ----------------------------------------------------------
#: Sign, two exponent bits and the mantissa bit of a bfloat16 that holds value * 2^-126.
MASK = 0x81C081C0
#: Where the first three registers' fields lie in the word: (sign, e1, e0, m) of the low and high half.
_FIELDS = {
    (0, 0): ((13, 6, 5, 4), (29, 22, 21, 20)),  # (q << 2) & MASK
    (1, 0): ((9, 2, 1, 0), (25, 18, 17, 16)),  # (q << 6) & MASK
    (0, 1): ((3, 28, 27, 26), (19, 12, 11, 10)),  # rotate(q, 12) & MASK
}


def e2m1_words(codes: Array) -> Array:
    """`owned` codes [..., 2 rows, 2 halves, 2 elements] -> words [...] uint32.

    The four registers of a word are (row, half) = (0, 0), (1, 0), (0, 1), (1, 1); the last one is
    (q ^ (q >> 8)) & MASK, whose eight free bits are solved for below, highest first.
    """
    bits = {i: (codes >> i) & 1 for i in range(4)}
    word: dict[int, Array] = {}
    for (row, half), places in _FIELDS.items():
        for element, place in enumerate(places):
            for source, target in zip((3, 2, 1, 0), place, strict=True):
                word[target] = bits[source][..., row, half, element]
    sign, high, low, least = ({e: bits[i][..., 1, 1, e] for e in (0, 1)} for i in (3, 2, 1, 0))
    word[31], word[24] = sign[1], high[1]
    word[23], word[30] = low[1] ^ word[31], least[1] ^ word[22]
    word[15] = sign[0] ^ word[23]
    word[7], word[8], word[14] = low[0] ^ word[15], high[0] ^ word[16], least[0] ^ word[6]
    return functools.reduce(jnp.bitwise_or, (bit << place for place, bit in word.items()))


def four_bytes(scales: Array) -> Array:
    """Scale bytes [N, B] -> words [N / 64, B / 8, 128] of two groups' bytes of two rows.

    Byte 0 and 1 are row g in group 0 and 1, byte 2 and 3 are row g + 8: masking leaves both rows of a group.
    """
    byte = by_thread(scales)
    low, high = (byte[:, i::2] for i in (0, 1))
    return low[..., 0] | (high[..., 0] << 8) | (low[..., 1] << 16) | (high[..., 1] << 24)


def unpacked_bytes(words: Array) -> Array:
    """`four_bytes` [..., 128] -> int32 [..., 2 groups, 128, 2 rows]."""
    byte = [[(words >> (8 * group + 16 * row)) & 0xFF for row in (0, 1)] for group in (0, 1)]
    return jnp.stack([jnp.stack(rows, -1) for rows in byte], -3).astype(jnp.int32)


def e2m1_codes(words: Array) -> Array:
    """Words [...] uint32 -> codes uint32 [..., 2 rows, 2 halves, 2 elements], the inverse of `e2m1_words`."""
    mask, q = jnp.uint32(MASK), words
    registers = jnp.stack([q << 2, q << 6, (q << 12) | (q >> 20), q ^ (q >> 8)], axis=-1) & mask
    registers = registers.reshape(*q.shape, 2, 2).swapaxes(-1, -2)  # row, half
    halves = jnp.stack([registers & 0xFFFF, registers >> 16], axis=-1)
    return ((halves >> 12) & 8) | ((halves >> 6) & 7)


def e2m1_values(words: Array) -> Array:
    """Words [...] uint32 -> float32 [..., 2 rows, 2 halves, 2 elements]: what the registers hold, * 2^126."""
    codes = e2m1_codes(words)
    magnitude = (codes & 7).astype(jnp.int32)
    twice = jnp.where(magnitude < 2, magnitude, (2 + (magnitude & 1)) << jnp.maximum((magnitude >> 1) - 1, 0))
    return jnp.where(codes >= 8, -0.5, 0.5) * twice.astype(jnp.float32)


def side_by_side(tiles: Array) -> Array:
    """[..., chunks, 64, 64] float32 -> bfloat16 [..., 64, 64 * chunks]."""
    *lead, chunks, rows, _ = tiles.shape
    return jnp.moveaxis(tiles, -3, -2).reshape(*lead, rows, chunks * CHUNK).astype(jnp.bfloat16)


def e2m1_columns(codes: Array, scale: Array) -> Array:
    """Words [..., rows, 128] and scales [..., chunks, 128, 2 rows] float32 -> bfloat16 [..., 64, K]."""
    *lead, rows, _ = codes.shape
    value = e2m1_values(codes.reshape(*lead, rows // 4, 128, 4))
    return side_by_side(disowned(value * scale[..., None, :, None, None]))


# ---- registers --------------------------------------------------------------------------------
def i32() -> ir.Type:
    """MLIR's 32-bit integer."""
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> ir.Value:
    """A 32-bit constant."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value - (1 << 32) if value >> 31 else value))


def shifted(value: ir.Value, left: int) -> ir.Value:
    """value << left, or >> -left."""
    if left >= 0:
        return arith.shli(value, constant(left)) if left else value
    return arith.shrui(value, constant(-left))


def masked(value: ir.Value, mask: int) -> ir.Value:
    """value & mask."""
    return arith.andi(value, constant(mask))


def rotated(value: ir.Value, left: int) -> ir.Value:
    """value rotated left."""
    return llvm.inline_asm(i32(), [value], f"shf.l.wrap.b32 $0, $1, $1, {left};", "=r,r")


def splat_halves(value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The low half twice and the high half twice."""
    return mu.prmt(value, value, constant(0x1010)), mu.prmt(value, value, constant(0x3232))


def times(a: ir.Value, b: ir.Value) -> ir.Value:
    """Two bfloat16 products, subnormals kept."""
    return llvm.inline_asm(i32(), [a, b], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")


def times_plus(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Two bfloat16 a * b + c, rounded once."""
    return llvm.inline_asm(i32(), [a, b, c], "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r")


def words_of(codes: fa.FragmentedArray) -> list[ir.Value]:
    """The four words that a thread holds of a chunk."""
    [register] = codes.registers.flat
    return [_extract(register, i) for i in range(4)]


def word_of(scales: fa.FragmentedArray) -> ir.Value:
    """The word that a thread holds of a row of scales."""
    [register] = scales.registers.flat
    return _extract(register, 0)


def _extract(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))


def e2m1_registers(q: ir.Value) -> list[list[ir.Value]]:
    """The registers [row][half] of a word: eight integer instructions for eight codes."""
    last = masked(arith.xori(q, shifted(q, -8)), MASK)
    return [
        [masked(shifted(q, 2), MASK), masked(rotated(q, 12), MASK)],
        [masked(shifted(q, 6), MASK), last],
    ]


def tile_of(registers: list[list[list[ir.Value]]]) -> fa.FragmentedArray:
    """Registers [step][row][half] -> the (64, 64) bfloat16 tile that wgmma takes as its left operand."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    out = np.empty(fa.WGMMA_LAYOUT.registers_shape((TILE_N, CHUNK)), dtype=object)
    for step, rows in enumerate(registers):
        for row, halves in enumerate(rows):
            for half, value in enumerate(halves):
                out[0, step * 2 + half, 0, 0, row, 0, 0, 0, 0] = mu.bitcast(value, pair)
    return fa.FragmentedArray(_registers=out, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def e2m1_tile(codes: fa.FragmentedArray, scale: ir.Value) -> fa.FragmentedArray:
    """A chunk's codes times the bfloat16 scales of row g (low half) and row g + 8."""
    by_row = splat_halves(scale)
    steps = [e2m1_registers(q) for q in words_of(codes)]
    return tile_of([[[times(v, by_row[r]) for v in row] for r, row in enumerate(rows)] for rows in steps])
