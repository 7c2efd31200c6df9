"""Position-sensitive 32-bit checksums of quantized weights, comparable between the two sides.

A checksum is an integer sum modulo 2^32, so it does not depend on the order in which a device
adds, on sharding or on fusion: equal codes give equal checksums everywhere.
"""

import jax
import jax.numpy as jnp

from fp4rl_jax.arrays import Array
from fp4rl_jax.qtensor import QTensor


def checksum(values: Array) -> Array:
    """Checksum of all elements of an array of uint8 codes or float32 scales.

    sum_i (v_i + 1) * odd(i) mod 2^32, with v_i the element's bit pattern and odd(i) a mixed odd
    number of its position, so that moved, swapped and dropped elements all show.

    Args:
        values: [...] uint8, or float32 which is taken by its bits.

    Returns:
        [] uint32.
    """
    bits = values if values.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(values, jnp.uint32)
    place = _positions(bits.shape) * jnp.uint32(0x9E3779B1)
    place = (place ^ (place >> 15)) * jnp.uint32(0x85EBCA77) | jnp.uint32(1)
    return jnp.sum((bits.astype(jnp.uint32) + 1) * place, dtype=jnp.uint32)


def _positions(shape: tuple[int, ...]) -> Array:
    """Row-major position of every element modulo 2^32, made where the element lies."""
    place, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return place


def qtensor_checksums(q: QTensor) -> dict[str, Array]:
    """Checksums of one quantized array's parts: element codes, block-scale bytes, outer scale."""
    parts = {"codes": q.packed, "scale_bytes": q.scales, "outer_scale": q.outer_scale}
    return {name: checksum(part) for name, part in parts.items() if part is not None}
