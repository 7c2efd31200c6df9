"""Packed FP4 weights, one file a format: packing, decoding in registers, and the same in jnp.

A format is a module with the constants and functions of `nvfp4.py`; `FORMATS` are those there are.
"""

from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.formats import _words, hif4, mxfp4, nvfp4

__all__ = [
    "FORMATS",
    "TILE_N",
    "check_packable",
    "decode",
    "natural_k",
    "order_k",
    "pack",
    "packable",
    "padded_k",
    "unpacked_shape",
]

#: Rows of a packed block: a packed weight's rows are a multiple of it.
TILE_N = _words.TILE_N

Array = jax.Array

FORMATS: dict[str, ModuleType] = {"nvfp4": nvfp4, "mxfp4": mxfp4, "hif4": hif4}


def padded_k(k: int, fmt: str) -> int:
    """Columns that a packed weight of k columns has: whole packed blocks."""
    block = FORMATS[fmt].BLOCK_K
    return -(-k // block) * block


def unpacked_shape(packed: jax.ShapeDtypeStruct | Array, fmt: str) -> tuple[int, int]:
    """(n, k) of a packed weight, k with its padding.

    Raises:
        ValueError: the shape is not that of a packed weight of this format.
    """
    f = FORMATS[fmt]
    if packed.ndim != 4 or packed.shape[2:] != (f.CODE_ROWS + f.SCALE_ROWS, 128):
        expected = f"[N / 64, K / {f.BLOCK_K}, {f.CODE_ROWS + f.SCALE_ROWS}, 128]"
        raise ValueError(f"a packed {fmt} weight is {expected}, got {packed.shape}")
    return packed.shape[0] * _words.TILE_N, packed.shape[1] * f.BLOCK_K


def packable(codes: Array, scales: Array, fmt: str) -> Array:
    """[] bool: whether packing can hold this weight [N, K] (`check_packable`); works under jit."""
    return FORMATS[fmt].packable(codes, scales)


def check_packable(codes: Array, scales: Array, fmt: str) -> None:
    """Refuses what packing cannot hold; reads the arrays, so not under jit.

    Raises:
        ValueError: a scale is NaN (a block was poisoned by a value that is not finite), or an MXFP4
            block lies too far below the largest.
    """
    if not bool(packable(codes, scales, fmt)):
        raise ValueError(f"cannot pack a {fmt} weight of shape {codes.shape}: {FORMATS[fmt].NEEDS}")


def pack(codes: Array, scales: Array, fmt: str) -> tuple[Array, Array]:
    """Packs a weight for the matmul kernels; works under jit.

    Args:
        codes: [N, K] uint8, N a multiple of 64, any K. scales: [N, ceil(K / block) * width] uint8, the
            format's bytes. Neither may hold a NaN (`check_packable`).
        fmt: a name of `FORMATS`.

    Returns:
        (packed, unit): uint32 [N / 64, Kp / BLOCK_K, rows, 128], Kp = `padded_k(K)`; float32 [], a power
        of two that the product is multiplied by.

    Raises:
        ValueError: N is not a multiple of 64, or the scales have another shape.
    """
    f = FORMATS[fmt]
    n, k = codes.shape
    width = -(-k // f.BLOCK) * f.SCALE_WIDTH
    if n % _words.TILE_N or scales.shape != (n, width):
        raise ValueError(
            f"needs n a multiple of 64 and scales {(n, width)}, got {codes.shape}, {scales.shape}"
        )
    whole = padded_k(k, fmt)
    codes = jnp.pad(codes, ((0, 0), (0, whole - k)))
    padding = whole // f.BLOCK * f.SCALE_WIDTH - width
    unit = f.unit(scales)
    words, packed = f.pack_words(codes, jnp.pad(scales, ((0, 0), (0, padding))))
    return jnp.concatenate([words, packed], axis=2), unit


def order_k(x: Array, fmt: str) -> Array:
    """Activations [..., K] -> [..., Kp] in the columns' order of a packed weight, zeros in the padding."""
    k = x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded_k(k, fmt) - k)])
    return _words.order_k(padded, FORMATS[fmt].CHUNKS)


def natural_k(x: Array, fmt: str) -> Array:
    """The inverse of `order_k`, padding kept: [..., k], k a multiple of a quad's four blocks."""
    return _words.natural_k(x, FORMATS[fmt].CHUNKS)


def decode(packed: Array, fmt: str) -> Array:
    """[N / 64, K / BLOCK_K, rows, 128] -> bfloat16 [N, K]: the weights over `unit`, columns as ordered."""
    f = FORMATS[fmt]
    n, k = unpacked_shape(packed, fmt)
    tiles = f.decode_words(packed[:, :, : f.CODE_ROWS], packed[:, :, f.CODE_ROWS :])
    return tiles.swapaxes(1, 2).reshape(n, k)
