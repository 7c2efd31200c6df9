"""Operands of a block-scaled MMA: FP4 codes in the natural order, and scales as tensor cores address them.

`Coded` is a matrix of activations as the quantizer's codes and scale bytes. `to_blackwell` makes the
same of a packed weight, `from_blackwell` is its inverse. All is plain jnp and exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats import FORMATS, _words, order_k, unpacked_shape

Array = jax.Array

#: Formats whose scales a block-scaled MMA multiplies by itself, and the dtypes of those scales.
SCALE_DTYPES = {"nvfp4": jnp.float8_e4m3fn, "mxfp4": jnp.float8_e8m0fnu}
#: What `formats.decode` gives over code times scale, a power of two.
DECODED_OVER_CODED = {"nvfp4": 2.0**-19, "mxfp4": 1.0}
#: Rows and columns of scales that one tile holds: 32 lanes of 16 bytes.
TILE_ROWS, TILE_COLUMNS = 128, 4


class Coded(NamedTuple):
    """Quantized activations [m, k] in the natural order of columns.

    Attributes:
        codes: [m, k / 2] uint8, two codes a byte, the first in the low nibble.
        scales: [m, k / block] uint8: E4M3 for NVFP4, E8M0 for MXFP4.
        outer: [m] float32 that the rows are multiplied by, or None. It stays out of the products.
    """

    codes: Array
    scales: Array
    outer: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return (self.codes.shape[0], 2 * self.codes.shape[1])


def check_coded(x: Coded, fmt: str) -> None:
    """Refuses what is no `Coded` matrix of a format.

    Raises:
        ValueError: the format has no block-scaled MMA, or a shape or dtype is another.
    """
    if fmt not in SCALE_DTYPES:
        raise ValueError(f"codes are multiplied in {', '.join(SCALE_DTYPES)}, got {fmt!r}")
    block, columns = FORMATS[fmt].BLOCK, 2 * x.codes.shape[-1]
    right = x.codes.ndim == 2 and x.scales.shape == (x.codes.shape[0], columns // block)
    if not right or columns % block or x.codes.dtype != jnp.uint8 or x.scales.dtype != jnp.uint8:
        raise ValueError(
            f"{fmt} codes are uint8 [m, k / 2] with scales [m, k / {block}], got "
            f"{x.codes.dtype} {x.codes.shape} and {x.scales.dtype} {x.scales.shape}"
        )
    if x.outer is not None and x.outer.shape != x.codes.shape[:1]:
        raise ValueError(f"outer scales are [{x.codes.shape[0]}], got {x.outer.shape}")


def values(x: Coded, fmt: str) -> Array:
    """[m, padded k] bfloat16: code times scale, columns ordered as a packed weight's (`formats.order_k`).

    Exact in bfloat16: at most six significant bits. XLA on a CPU flushes products below 2^-126 to zero, which
    only the E8M0 bytes 0 and 1 give.
    """
    check_coded(x, fmt)
    scale = jax.lax.bitcast_convert_type(x.scales, SCALE_DTYPES[fmt]).astype(jnp.float32)
    value = code_values(unpacked_codes(x.codes)) * jnp.repeat(scale, FORMATS[fmt].BLOCK, axis=1)
    return order_k(value.astype(jnp.bfloat16), fmt)


def multiplied(x: Array | Coded, fmt: str) -> tuple[Array, Array | None]:
    """Either kind of activations as bfloat16 [m, padded k], columns ordered, and the rows' scales or None."""
    return (values(x, fmt), x.outer) if isinstance(x, Coded) else (x, None)


def unpacked_codes(codes: Array) -> Array:
    """[rows, k / 2] bytes -> [rows, k] uint8, the low nibble first."""
    return jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)


def packed_codes(codes: Array) -> Array:
    """The inverse of `unpacked_codes`."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def code_values(codes: Array) -> Array:
    """E2M1 codes -> float32."""
    table = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
    magnitude = table[(codes & 7).astype(jnp.int32)]
    return jnp.where(codes & 8, -magnitude, magnitude)


def as_float4(codes: Array) -> Array:
    """[rows, k / 2] bytes -> [rows, k] float4_e2m1fn; the same bytes on a GPU."""
    return jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(codes.shape[0], -1)


# ---- scales ------------------------------------------------------------------------------------
def scale_offset(row: int, column: int, columns: int) -> int:
    """Where the scale of (row, column) lies among the bytes of `swizzled`.

    The layout of `scale_vec::1X` to `4X` in the PTX manual, "tcgen05.mma", scale factor A; cuBLAS calls it
    the 128x4 tile.

    Args:
        columns: of scales, a multiple of four.
    """
    tile = (row // 128) * (columns // 4) + column // 4
    return (tile * 32 + row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def swizzled(scales: Array) -> Array:
    """Scales [rows, columns] -> [rows / 128, columns / 4, 32, 16], rows and columns filled up with zeros."""
    rows, columns = -(-scales.shape[0] // TILE_ROWS), -(-scales.shape[1] // TILE_COLUMNS)
    missing = (rows * TILE_ROWS - scales.shape[0], columns * TILE_COLUMNS - scales.shape[1])
    whole = jnp.pad(scales, ((0, missing[0]), (0, missing[1])))
    split = whole.reshape(rows, 4, 32, columns, 4)
    return split.transpose(0, 3, 2, 1, 4).reshape(rows, columns, 32, 16)


def unswizzled(tiles: Array) -> Array:
    """The inverse of `swizzled`, its filling kept: [128 rows, 4 columns]."""
    rows, columns = tiles.shape[:2]
    split = tiles.reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return split.reshape(rows * TILE_ROWS, columns * TILE_COLUMNS)


# ---- packed weights ----------------------------------------------------------------------------
def to_blackwell(packed: Array, fmt: str) -> tuple[Array, Array]:
    """A packed weight as the operand of a block-scaled MMA.

    Args:
        packed: uint32 [n / 64, k / BLOCK_K, rows, 128], see `formats.pack`.
        fmt: "nvfp4" or "mxfp4".

    Returns:
        (codes, scales): uint8 [n, k / 2] in the natural order, two a byte, and `swizzled` uint8
        [n / 128, k / block / 4, 32, 16], n filled up. Code times scale times `DECODED_OVER_CODED` is the
        decoded weight.

    Raises:
        ValueError: the format's scales have no dtype of their own (HiF4), or the shape is not a packed one.
    """
    if fmt not in SCALE_DTYPES:
        raise ValueError(f"block-scaled MMAs have {', '.join(SCALE_DTYPES)}, got {fmt!r}")
    n, k = unpacked_shape(packed, fmt)
    f = FORMATS[fmt]
    words = packed[:, :, : f.CODE_ROWS].reshape(n // 64, k // 64, 128, 4)
    tiles = _words.disowned(_words.e2m1_codes(words)).swapaxes(1, 2).reshape(n, k)
    codes = packed_codes(_words.natural_k(tiles, f.CHUNKS).astype(jnp.uint8))
    byte = _words.unpacked_bytes(packed[:, :, f.CODE_ROWS])  # [n / 64, k / BLOCK_K, 2 groups, 128, 2 rows]
    rows = _words.by_row(byte.reshape(n // 64, -1, 128, 2))
    return codes, swizzled(f.scale_bytes(rows).astype(jnp.uint8))


def from_blackwell(codes: Array, scales: Array, fmt: str) -> Array:
    """The inverse of `to_blackwell`: the words of `formats.pack`.

    Args:
        codes: [n, k / 2] uint8, n a multiple of 64. scales: [n / 128, k / block / 4, 32, 16] uint8.

    Returns:
        uint32 [n / 64, k / BLOCK_K, rows, 128], bit for bit, but for the scales of empty MXFP4 blocks more
        than 126 binades below the largest, which E8M0 clips.
    """
    f = FORMATS[fmt]
    n, k = codes.shape[0], 2 * codes.shape[1]
    shape = (n // 64, k // f.BLOCK_K)
    words = _words.e2m1_words(_words.owned(unpacked_codes(codes), f.CHUNKS))
    rows = f.moved_bytes(unswizzled(scales)[:n, : k // f.BLOCK])
    packed = _words.four_bytes(rows).reshape(*shape, f.SCALE_ROWS, 128)
    return jnp.concatenate([words.reshape(*shape, f.CODE_ROWS, 128), packed], axis=2)
