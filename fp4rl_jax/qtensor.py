"""The pytree of a quantized array: packed codes, scale bytes, outer scale, and what they mean."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import Format


@struct.dataclass
class QTensor:
    """A quantized array of shape [...], standing for `dequantize()`.

    The quantized axis is stored last, so a QTensor whose leaves carry extra leading axes (stacked
    layers) passes through vmap and scan. The shape is derived, never stored, so the leaves may also
    be sharded or cut along any axis, in whole blocks.

    Attributes:
        packed: [..., ceil(N / block) * block * code_bits / 8] uint8, N the quantized axis.
        scales: [..., ceil(N / block) * scale_width] uint8.
        outer_scale: float32: [] for a tensor, [..., 1] a row, [..., blocks] for FP8 blocks; None
            where the format has none. The rows' layout is that of `packed`.
        fmt: the format, static.
        axis: the quantized axis, static and negative.
        padding: zeros appended to the quantized axis to fill its last block, static.
    """

    packed: Array
    scales: Array
    outer_scale: Array | None
    fmt: Format = struct.field(pytree_node=False)
    axis: int = struct.field(pytree_node=False, default=-1)
    padding: int = struct.field(pytree_node=False, default=0)

    @property
    def length(self) -> int:
        """N, the size of the quantized axis without padding."""
        return self.packed.shape[-1] * 8 // self.fmt.code_bits - self.padding

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantized."""
        return _insert(self.packed.shape[:-1], self.axis, self.length)

    @property
    def ndim(self) -> int:
        """Number of axes of the array that was quantized."""
        return len(self.packed.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales and outer scale, padding included."""
        leaves = jax.tree.leaves(self)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def bits_per_value(self) -> float:
        """Bits a value takes with its block scales; the outer scale is not counted."""
        return self.fmt.bits_per_value

    @property
    def finite(self) -> Array:
        """[] bool, False where a non-finite input has poisoned a block."""
        finite = jnp.all(self.fmt.finite_blocks(self.scales, self.outer_scale))
        if self.fmt.code_nan is not None:
            finite &= jnp.all(self.fmt.unpack(self.packed) != self.fmt.code_nan)
        return finite

    def codes(self) -> Array:
        """uint8 codes in the shape of the array: 0..15, or the raw byte of an 8-bit format."""
        return _codes(self)

    def scale_bytes(self) -> Array:
        """uint8 block-scale bytes; the quantized axis counts blocks * bytes a block."""
        return jnp.moveaxis(self.scales, -1, self.axis)

    def inner(self, dtype: DTypeLike = jnp.float32) -> Array:
        """Element value times block scale, without the outer scale, in the array's shape.

        Exact in bfloat16 and float32 alike: multiply it with another operand's, accumulate in
        float32, and apply the outer scales to the result.
        """
        return _inner(self, dtype)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> Array:
        """The values, outer scale included; nan throughout a poisoned block."""
        return _decode(self, dtype)


def dequantize(q: QTensor, dtype: DTypeLike = jnp.float32) -> Array:
    """The values that `q` stands for: element * block scale * outer scale.

    Args:
        q: a QTensor.
        dtype: float32 or bfloat16. Exact in both where the outer scale is a power of two.

    Returns:
        Array of shape `q.shape`.
    """
    return q.dequantize(dtype)


def _insert(lead: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    position = len(lead) + 1 + axis
    return (*lead[:position], length, *lead[position:])


def _restore(q: QTensor, x: Array) -> Array:
    return jnp.moveaxis(x[..., : q.length], -1, q.axis)


@jax.jit
def _codes(q: QTensor) -> Array:
    return _restore(q, q.fmt.unpack(q.packed))


@partial(jax.jit, static_argnums=1)
def _inner(q: QTensor, dtype: DTypeLike) -> Array:
    return _restore(q, q.fmt.inner(q.fmt.unpack(q.packed), q.scales, dtype))


@partial(jax.jit, static_argnums=1)
def _decode(q: QTensor, dtype: DTypeLike) -> Array:
    return _restore(q, q.fmt.decode(q.fmt.unpack(q.packed), q.scales, q.outer_scale, dtype))
