"""The single road from an array to codes: move and pad the axis, reduce amax, ask the format."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import Format, _bits
from fp4rl_jax.formats._base import RoundingFn, once, pad_last, share_rows
from fp4rl_jax.quantizers.rounding import Hint, Rounding

AxisName = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Scaled:
    """An array about to be rounded: padded, its scales chosen.

    Attributes:
        x: [..., padded N], quantized axis last.
        scales: [..., padded N / block * scale width] uint8.
        outer_scale: float32 or None.
        span_amax: int32 raw pattern that the outer scale was made from, where known.
        rounding: which neighbour a value takes, the hint or key inside.
    """

    x: Array
    scales: Array
    outer_scale: Array | None
    span_amax: Array | None
    rounding: RoundingFn

    def codes(self, fmt: Format) -> Array:
        """[..., padded N] uint8."""
        return fmt.encode(
            self.x, self.scales, self.outer_scale, rounding=self.rounding, span_amax=self.span_amax
        )


def choose_scales(
    x: Array,
    fmt: Format,
    rounding: Rounding,
    *,
    axis: int,
    key: Array | None,
    hint: Hint | None,
    outer_scale: Array | None,
    axis_name: AxisName,
) -> Scaled:
    """The single road from an array to its scales; see `quantize` for the arguments."""
    moved = jnp.moveaxis(x, axis, -1)
    block = fmt.block or max(moved.shape[-1], 1)
    padded = pad_last(moved, -(-moved.shape[-1] // block) * block)
    shape = (*padded.shape[:-1], padded.shape[-1] // block, block)
    if rounding.borrows_scales and hint is not None:
        _check_hint(hint, fmt, axis, moved.shape)
    round_with = rounding.prepare(shape, fmt, key, hint)
    if rounding.borrows_scales and hint is not None:
        return Scaled(padded, hint.scales, hint.outer_scale, None, round_with)
    amax = share_rows(_bits.block_amax(padded.reshape(shape)), fmt.block_rows, "max")
    outer, span_amax = _outer(fmt, amax, outer_scale, axis, axis_name)
    scales, outer = once((fmt.choose_scales(padded, amax, outer, span_amax=span_amax), outer))
    return Scaled(padded, scales, outer, span_amax, round_with)


def _outer(
    fmt: Format, amax: Array, given: Array | None, axis: int, axis_name: AxisName
) -> tuple[Array | None, Array | None]:
    """The outer scale and the raw pattern of the amax it was made from (None where given)."""
    if fmt.span == "static":
        if given is None:
            raise ValueError(f'format {fmt.name} with outer="static" needs outer_scale=, and got None')
        given = jnp.asarray(given, jnp.float32)
        if given.ndim == amax.ndim:
            given = jnp.moveaxis(given, axis, -1)
        elif given.ndim:
            raise ValueError(
                f"outer_scale has shape {given.shape}: expected a scalar, or {amax.ndim} axes that"
                " broadcast to x"
            )
        return given, None
    if given is not None:
        raise ValueError(f'outer_scale= is for outer="static"; format {fmt.name} has outer={fmt.span!r}')
    if fmt.span == "none":
        return None, None
    poisoned = amax >= _bits.RAW_INFINITY
    # a poisoned block has no say in the outer scale; where it is the whole span, the scale is nan
    finite = jnp.where(poisoned, 0, amax)
    span = {"tensor": None, "row": -1, "block": ()}[fmt.span]
    finite = finite.max(axis=span, keepdims=fmt.span == "row", initial=0)
    if axis_name is not None and fmt.span != "block":
        finite = lax.pmax(finite, axis_name)
    outer = fmt.outer_from_amax(finite)
    if not fmt.scale_width:  # nothing but the outer scale can carry the poison
        bad = poisoned if fmt.span == "block" else poisoned.any(axis=-1, keepdims=True)
        if axis_name is not None and fmt.span != "block":
            bad = lax.pmax(bad.astype(jnp.int32), axis_name) > 0
        outer = jnp.where(bad, jnp.float32(jnp.nan), outer)
    return outer, finite


def _check_hint(hint: Hint, fmt: Format, axis: int, moved: tuple[int, ...]) -> None:
    """The hint must describe this very array: same format, axis and shape."""
    lead = hint.scales.shape[:-1]
    if (hint.fmt, hint.axis, hint.length, lead) != (fmt, axis, moved[-1], moved[:-1]):
        raise ValueError(
            f"hint is of format {hint.fmt}, axis {hint.axis}, shape {(*lead, hint.length)} with that axis"
            f" last; the array is quantized to {fmt} along axis {axis}, shape {moved}"
        )
