"""Quantizer: a format, a rounding and a gradient rule as one static function from arrays."""

import dataclasses
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array, check_name, unknown_name
from fp4rl_jax.formats import Format, make
from fp4rl_jax.formats._base import once, widen_exact
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import _fake, hadamard
from fp4rl_jax.quantizers._encode import AxisName, Scaled, choose_scales
from fp4rl_jax.quantizers.rounding import Hint, Nearest, Rounding

Ste = Literal["identity", "clipped"]
Rotation = Literal["none", "hadamard16"]


def _check_array(x: Array, axis: int, fmt: Format, axis_name: AxisName) -> int:
    """The quantized axis as a negative number, after checking dtype, rank and shard boundaries."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"quantize takes float32 or bfloat16, got {x.dtype}")
    if not -x.ndim <= axis < x.ndim:
        known = [str(a) for a in range(-x.ndim, x.ndim)]
        raise unknown_name(f"axis of an array of shape {x.shape}", str(axis), known)
    axis = axis - x.ndim if axis >= 0 else axis
    if fmt.block_rows > 1 and x.ndim < 2:
        raise ValueError(f"block_shape of {fmt.block_rows} rows needs two axes, got shape {x.shape}")
    if axis_name is not None:
        _check_shard(x, axis, fmt, axis_name)
    return axis


def _check_shard(x: Array, axis: int, fmt: Format, axis_name: AxisName) -> None:
    """A shard must hold whole blocks, or blocks would be cut at its border."""
    sizes = [(axis, fmt.block or 1)]
    if fmt.block_rows > 1:
        rows = -1 if axis < -1 else -2
        sizes.append((rows, fmt.block_rows))
    for which, block in sizes:
        if x.shape[which] % block:
            raise ValueError(
                f"axis {which} of a shard has {x.shape[which]} values, not a multiple of the block of"
                f" {block} of format {fmt.name}: sharding over {axis_name!r} would cut a block"
            )


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """A function from arrays to QTensors, complete and static: format, rounding, gradient rule.

    Frozen, hashable and equal by value, so it may be a static argument of jit. Both sides of the
    RL loop quantize through it and nothing else does.

    Attributes:
        fmt: a Format, or a name of one (its defaults).
        rounding: Nearest(), Stochastic() or Guided().
        ste: gradient of `fake_quantize`: "identity", or "clipped" (zero where the value lies
            beyond the largest element of its block).
        rotation: "hadamard16" quantizes the array as rotated along the quantized axis (see
            `quantizers.hadamard`); the QTensor holds rotated values. For both operands of a product,
            in which the rotation cancels.
    """

    fmt: Format
    rounding: Rounding = Nearest()
    ste: Ste = "identity"
    rotation: Rotation = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fmt", make(self.fmt))
        check_name("ste", self.ste, ("identity", "clipped"))
        check_name("rotation", self.rotation, ("none", "hadamard16"))

    def seen(self, x: Array, axis: int = -1) -> Array:
        """The array that the format is given for `x`: rotated where there is a rotation."""
        return x if self.rotation == "none" else hadamard.rotate(x.astype(jnp.float32), axis)

    def quantize(
        self,
        x: Array,
        *,
        axis: int = -1,
        key: Array | None = None,
        hint: Hint | None = None,
        outer_scale: Array | None = None,
        axis_name: AxisName = None,
    ) -> QTensor:
        """Rounds `x` to the format's grid; see `fp4rl_jax.quantize`."""
        axis = _check_array(x, axis, self.fmt, axis_name)
        return _quantize(x, key, hint, outer_scale, quantizer=self, axis=axis, axis_name=axis_name)

    __call__ = quantize

    def inner(
        self,
        x: Array,
        *,
        dtype: DTypeLike = jnp.float32,
        axis: int = -1,
        key: Array | None = None,
        hint: Hint | None = None,
        outer_scale: Array | None = None,
        axis_name: AxisName = None,
    ) -> tuple[Array, Array | None]:
        """`q.inner(dtype), q.outer_scale` of `q = quantize(x, ...)`, without packing the codes.

        For operands that are consumed at once, such as activations of an emulated matmul.
        """
        axis = _check_array(x, axis, self.fmt, axis_name)
        return _inner(x, key, hint, outer_scale, quantizer=self, dtype=dtype, axis=axis, axis_name=axis_name)

    def fake_quantize(
        self,
        x: Array,
        *,
        axis: int = -1,
        key: Array | None = None,
        hint: Hint | None = None,
        outer_scale: Array | None = None,
        axis_name: AxisName = None,
    ) -> Array:
        """Quantizes and dequantizes, differentiably; see `fp4rl_jax.fake_quantize`."""
        if self.rotation != "none":
            raise ValueError(
                f"fake_quantize has no meaning in a rotated space, got rotation={self.rotation!r}"
            )
        axis = _check_array(x, axis, self.fmt, axis_name)
        return _fake.fake_quantize(
            x, key, hint, outer_scale, self.fmt, self.rounding, self.ste, axis, axis_name
        )


@partial(jax.jit, static_argnames=("quantizer", "axis", "axis_name"))
def _quantize(
    x: Array,
    key: Array | None,
    hint: Hint | None,
    outer_scale: Array | None,
    *,
    quantizer: Quantizer,
    axis: int,
    axis_name: AxisName,
) -> QTensor:
    fmt = quantizer.fmt
    x = quantizer.seen(x, axis)
    scaled = choose_scales(
        x,
        fmt,
        quantizer.rounding,
        axis=axis,
        key=key,
        hint=hint,
        outer_scale=outer_scale,
        axis_name=axis_name,
    )
    packed = fmt.pack(once(scaled.codes(fmt)))  # stored first: pairing breaks up the vector loop
    padding = scaled.x.shape[-1] - x.shape[axis]
    return QTensor(packed, scaled.scales, scaled.outer_scale, fmt=fmt, axis=axis, padding=padding)


@partial(jax.jit, static_argnames=("quantizer", "dtype", "axis", "axis_name"))
def _inner(
    x: Array,
    key: Array | None,
    hint: Hint | None,
    outer_scale: Array | None,
    *,
    quantizer: Quantizer,
    dtype: DTypeLike,
    axis: int,
    axis_name: AxisName,
) -> tuple[Array, Array | None]:
    fmt = quantizer.fmt
    x = quantizer.seen(x, axis)
    scaled = choose_scales(
        x,
        fmt,
        quantizer.rounding,
        axis=axis,
        key=key,
        hint=hint,
        outer_scale=outer_scale,
        axis_name=axis_name,
    )
    value = _values(scaled, quantizer, dtype)[..., : x.shape[axis]]
    return jnp.moveaxis(value, -1, axis), scaled.outer_scale


def _values(scaled: Scaled, quantizer: Quantizer, dtype: DTypeLike) -> Array:
    """[..., padded N] elements times block scales: through the codes, or the short way to the same bits."""
    fmt = quantizer.fmt

    def through_codes() -> Array:
        return fmt.inner(scaled.codes(fmt), scaled.scales, dtype)

    def nearest() -> Array:
        return widen_exact(fmt.nearest_values(scaled.x, scaled.scales, scaled.outer_scale), dtype)

    if not (fmt.has_ladder and isinstance(quantizer.rounding, Nearest) and scaled.x.dtype == jnp.bfloat16):
        return through_codes()
    return jax.lax.platform_dependent(cpu=nearest, default=through_codes)
