"""What every number format answers; one file of this folder defines one.

A format is a frozen dataclass whose fields are its options, so it is hashable, printable and
static under jit. Arrays given to its methods have the quantized axis LAST and already padded to
whole blocks; `fp4rl_jax.quantizers` does the moving and padding. `encode` is the only place of
the project that narrows a value.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array, PyTree, unknown_name
from fp4rl_jax.formats import _bits, _ladder
from fp4rl_jax.formats._grid import Bracket, Grid, GridBracket

Span = Literal["none", "tensor", "row", "static", "block"]
#: Turns the place of every value between its neighbours, and its sign, into a magnitude code.
RoundingFn = Callable[[Bracket, Array], Array]


def to_nearest(bracket: Bracket, negative: Array) -> Array:
    """The default rounding of `Format.encode`: nearest, ties as the format has them."""
    del negative
    return bracket.nearest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A block-scaled sign-magnitude number format: x = code value * block scale * outer scale.

    A new format sets the class attributes and implements `choose_scales` and `block_scale`; the
    rest follows. Override `bracket` where a value meets its scale in another way, and `inner`
    where a value's product with its scale is not a plain float32 product.

    Attributes:
        code_bits: 4 (two codes a byte, the first in the low nibble) or 8.
        grid: the magnitudes that a code's lower bits count.
        scale_width: bytes of scale data a block carries.
        scale_kind: what the scale data of a block holds, in words.
        scale_nan: the byte that marks a poisoned block in the first of them; None where the
            outer scale or `code_nan` does.
        power_of_two_scale: whether a block has one scale and that is a power of two, so that the error
            of its rounding can be told from the grid's (`quantizers.error_split`).
        native: name of the jax dtype whose values the elements are and that some hardware
            multiplies, where no block scale comes between; None otherwise.
    """

    code_bits: ClassVar[int] = 4
    grid: ClassVar[Grid]
    scale_width: ClassVar[int] = 1
    scale_kind: ClassVar[str] = "one byte"
    scale_nan: ClassVar[int | None] = 0xFF
    power_of_two_scale: ClassVar[bool] = False
    native: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            allowed = field.metadata.get("choices")
            value = getattr(self, field.name)
            if allowed and value not in allowed:
                known = [str(choice) for choice in allowed]
                raise unknown_name(f"{field.name} of format {self.name}", str(value), known)

    # ---- facts -------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The name it is found by: that of its file."""
        return type(self).__module__.rsplit(".", 1)[-1]

    @property
    def block(self) -> int | None:
        """Elements along the quantized axis that share a block scale; None for the whole row."""
        raise NotImplementedError

    @property
    def block_rows(self) -> int:
        """Rows (along the axis before the quantized one) that share a block scale."""
        return 1

    @property
    def span(self) -> Span:
        """What one outer scale covers."""
        return "none"

    @property
    def outer_is_power_of_two(self) -> bool:
        """Whether outer scales are powers of two (or absent), so that they commute with rounding."""
        return True

    @property
    def code_nan(self) -> int | None:
        """The code of every element of a poisoned block, where no scale can mark it; None elsewhere."""
        return None

    @property
    def has_ladder(self) -> bool:
        """Whether `nearest_values` serves it: a block has one scale, exact products with midpoints,
        and neither `bracket` nor `inner` has rules of its own."""
        return False

    @property
    def qmax(self) -> float:
        """The largest magnitude of an element before its scales."""
        return self.grid.max

    @property
    def bits_per_value(self) -> float:
        """Bits a value takes, block scales included and outer scales not."""
        return self.code_bits + (8 * self.scale_width / self.block if self.block else 0.0)

    @property
    def levels(self) -> tuple[str, ...]:
        """Its levels of scales in words, innermost first."""
        area = f"{self.block_rows} x {self.block}" if self.block_rows > 1 else f"{self.block}"
        inner = (f"{self.scale_kind} a block of {area}",) if self.scale_width else ()
        span = {
            "none": None,
            "static": "given by the caller",
            "block": f"a block of {self.block}",
        }.get(self.span, f"a {self.span}")
        kind = "power of two" if self.outer_is_power_of_two else "float32"
        return inner if span is None else (*inner, f"{kind} {span}")

    # ---- scales ------------------------------------------------------------------------------
    def outer_from_amax(self, amax: Array) -> Array:
        """float32 outer scale of a span whose largest finite magnitude has raw pattern `amax`."""
        raise NotImplementedError(f"format {self.name} has no outer scale")

    def choose_scales(
        self, x: Array, amax: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Array:
        """The scale bytes of every block.

        Args:
            x: [..., N] float32 or bfloat16, N a multiple of the block.
            amax: [..., N / block] int32, raw patterns of the block maxima (see `_bits`); those of
                non-finite blocks are at least `_bits.RAW_INFINITY`.
            outer_scale: float32, broadcastable to [..., N / block], or None.
            span_amax: int32 raw pattern that the outer scale was made from, where known.

        Returns:
            [..., N / block * scale_width] uint8; `scale_nan` leads a non-finite block.
        """
        raise NotImplementedError

    def block_scale(self, scales: Array) -> Array:
        """[..., N / block] float32 value of the scale bytes; nan for a poisoned block."""
        raise NotImplementedError

    # ---- codes -------------------------------------------------------------------------------
    def bracket(
        self, x: Array, scales: Array, outer_scale: Array | None, *, span_amax: Array | None = None
    ) -> Bracket:
        """Where |x| [..., blocks, block] lies between grid points, given its scales.

        The default compares |x| with grid points times scale, exactly wherever such a product
        fits float32's 24 bits: block scales of few bits, outer scales that are powers of two.
        """
        del span_amax
        scale = _bits.from_float(self.block_scale(scales))
        if outer_scale is not None:
            scale = self.under_outer(scale, outer_scale)
        scale = once(scale[..., None])
        magnitude = _bits.scaled(_bits.from_float(x), _bits.exponent(scale))
        return GridBracket(self.grid, magnitude, _bits.unit(scale))

    def encode(
        self,
        x: Array,
        scales: Array,
        outer_scale: Array | None = None,
        *,
        rounding: RoundingFn = to_nearest,
        span_amax: Array | None = None,
    ) -> Array:
        """Rounds `x / (block scale * outer scale)` to the grid: the one narrowing of the project.

        Args:
            x: [..., N] float32 or bfloat16.
            scales: [..., ceil(N / block) * scale_width] uint8; leading axes broadcast.
            outer_scale: float32 broadcastable to the blocks, or None.
            rounding: which neighbour to take; nearest by default.
            span_amax: int32 raw pattern of the magnitude that the outer scale was made from, where
                the caller still has it (a float32 outer scale does not determine it).

        Returns:
            [..., N] uint8 codes; 0 throughout a block whose scale is zero or nan, and `code_nan`
            throughout a non-finite one, where the format has it.

        Exact: `encode(decode(c, s), s) == c` for every code but -0 and every usable scale.
        """
        blocks, length = self._to_blocks(x)
        lead = jnp.broadcast_shapes(blocks.shape[:-2], scales.shape[:-1])
        blocks = jnp.broadcast_to(blocks, lead + blocks.shape[-2:])
        sign = _bits.negative(blocks)
        magnitude = rounding(self.bracket(blocks, scales, outer_scale, span_amax=span_amax), sign)
        code = magnitude | (sign.astype(jnp.int32) << (self.code_bits - 1))
        code = jnp.where(once(self._live(scales, outer_scale))[..., None], code, 0)
        if self.code_nan is not None:
            poisoned = _bits.block_amax(blocks)[..., None] >= _bits.RAW_INFINITY
            code = jnp.where(poisoned, self.code_nan, code)
        return self._from_blocks(code.astype(jnp.uint8), length)

    def inner(self, codes: Array, scales: Array, dtype: DTypeLike = jnp.float32) -> Array:
        """Element value times block scale, without the outer scale.

        Args:
            codes: [..., N] uint8.
            scales: as `encode` takes them.
            dtype: float32 or bfloat16; both hold the result exactly (six significant bits).
        """
        blocks, length = self._to_blocks(codes)
        value = self.element(blocks)
        if self.scale_width:
            value = self._product(value, once(self.block_scale(scales))[..., None])
        return self._from_blocks(narrow_exact(value, dtype), length)

    def nearest_values(self, x: Array, scales: Array, outer_scale: Array | None) -> Array:
        """`inner(encode(x, scales, outer_scale), scales, bfloat16)` of a bfloat16 x, without the codes.

        Of a format that `has_ladder`; fewer and narrower instructions for a CPU, see `_ladder`.

        Exact: the same bits, whatever x.
        """
        blocks, length = self._to_blocks(x)
        scale = once(self.block_scale(scales))
        log = _bits.from_float(scale)
        if outer_scale is not None:
            log = self.under_outer(log, outer_scale)
        levels = jnp.asarray(self.grid.values, jnp.float32)[:, None]
        values = self._product(*jnp.broadcast_arrays(levels, scale[..., None, :]))
        ladder = _ladder.build(self.grid, log, values, self._live(scales, outer_scale))
        return self._from_blocks(_ladder.nearest(blocks, once(ladder)), length)

    def _product(self, element: Array, scale: Array) -> Array:
        """Element times block scale, right over the whole range of float32, subnormals included.

        A format whose products are never subnormal overrides this with a plain product.
        """
        log = _bits.multiply(_bits.from_float(element), _bits.from_float(scale))
        value = jnp.where(element == 0, 0, _bits.to_float(log))
        value = jnp.where(jnp.isnan(scale), scale, value)
        return jnp.where(_bits.negative(element), -value, value)

    def element(self, codes: Array) -> Array:
        """float32 value of codes before any scale."""
        codes = codes.astype(jnp.int32)
        magnitude = self.grid.decode(codes & ((1 << (self.code_bits - 1)) - 1))
        return jnp.where(codes >> (self.code_bits - 1) == 1, -magnitude, magnitude)

    def decode(
        self,
        codes: Array,
        scales: Array,
        outer_scale: Array | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> Array:
        """The values that codes stand for; arguments as in `encode`, whose inverse it is."""
        inner = self.inner(codes, scales)
        if outer_scale is not None:
            inner = apply_outer(inner, *self._outer_factors(outer_scale))
        if dtype == jnp.bfloat16:  # a GPU compiler folds a plain cast there and back away
            inner = lax.reduce_precision(inner, exponent_bits=8, mantissa_bits=7)
        return inner.astype(dtype)

    def _outer_factors(self, outer_scale: Array) -> tuple[Array, ...]:
        """The outer scale as factors to apply in turn, none of which is subnormal."""
        if self.outer_is_power_of_two:
            return (outer_scale,)
        log = _bits.from_float(outer_scale)
        half = jnp.clip(_bits.exponent(log) // 2, -126, 127)
        rest = _bits.to_float(log - (half << _bits.MANTISSA))
        rest = jnp.where(outer_scale == 0, 0, jnp.where(jnp.isfinite(outer_scale), rest, outer_scale))
        return rest, _bits.power_of_two(half)

    def pack(self, codes: Array) -> Array:
        """[..., N] codes -> [..., N * code_bits / 8] bytes, the first code in the low nibble."""
        if self.code_bits == 8:
            return codes
        pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
        both = lax.bitcast_convert_type(pairs, jnp.uint16)
        return (both | (both >> 4)).astype(jnp.uint8)

    def unpack(self, packed: Array) -> Array:
        """The inverse of `pack`."""
        if self.code_bits == 8:
            return packed
        wide = packed.astype(jnp.uint16)
        pairs = lax.bitcast_convert_type((wide | (wide << 4)) & 0x0F0F, jnp.uint8)
        return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)

    def finite_blocks(self, scales: Array, outer_scale: Array | None) -> Array:
        """bool per block, False where a non-finite input has poisoned it."""
        finite = None if outer_scale is None else jnp.isfinite(outer_scale)
        if self.scale_nan is None:
            return jnp.ones((), bool) if finite is None else finite
        lead = scales.reshape(*scales.shape[:-1], scales.shape[-1] // self.scale_width, self.scale_width)
        fine = lead[..., 0] != self.scale_nan
        return fine if finite is None else fine & left_aligned(finite, fine.ndim)

    def within(self, x: Array, scales: Array, outer_scale: Array | None) -> Array:
        """bool [..., N], True where |x| does not exceed the largest value its scales can hold."""
        blocks, length = self._to_blocks(x)
        limit = _bits.from_float(self._unit(scales) * jnp.float32(self.qmax))
        if outer_scale is not None:
            limit = _bits.multiply(limit, _bits.from_float(left_aligned(outer_scale, limit.ndim)))
        return self._from_blocks(_bits.from_float(blocks) <= limit, length)

    def _unit(self, scales: Array) -> Array:
        """float32 scale of every element, [..., blocks, 1 or block]; more than the block's where
        there are scales inside it."""
        return self.block_scale(scales)[..., None]

    def over_outer(self, log: Array, outer_scale: Array | None) -> Array:
        """A magnitude in log form (see `_bits`) divided by its outer scale.

        Exact for a power of two; else multiplied with the reciprocal, both rounded to float32.
        """
        if outer_scale is None:
            return log
        outer = _bits.from_float(outer_scale)
        if self.outer_is_power_of_two and self.span != "static":
            return log - (_bits.exponent(outer) << _bits.MANTISSA)
        return _bits.multiply(log, _bits.divide(jnp.int32(_bits.ONE), outer))

    def under_outer(self, log: Array, outer_scale: Array) -> Array:
        """A magnitude in log form times its outer scale: exact for a power of two, else rounded."""
        outer = _bits.from_float(outer_scale)
        if self.outer_is_power_of_two and self.span != "static":
            return log + (_bits.exponent(outer) << _bits.MANTISSA)
        return _bits.multiply(log, outer)

    # ---- helpers -----------------------------------------------------------------------------
    def _live(self, scales: Array, outer_scale: Array | None) -> Array:
        """bool per block, True where its codes mean anything."""
        scale = _bits.raw(self.block_scale(scales))  # as bits: a subnormal scale is not zero
        live = (scale > 0) & (scale < _bits.RAW_INFINITY)
        return live if outer_scale is None else live & jnp.isfinite(outer_scale)

    def _to_blocks(self, x: Array) -> tuple[Array, int]:
        """[..., N] -> [..., blocks, block] with a zero-padded last block, and N."""
        length = x.shape[-1]
        block = self.block or max(length, 1)
        count = -(-length // block)
        x = pad_last(x, count * block)
        return x.reshape(*x.shape[:-1], count, block), length

    def _from_blocks(self, x: Array, length: int) -> Array:
        flat = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
        return flat[..., :length]


def once(x: PyTree) -> PyTree:
    """Values that are computed once and stored, not again for every element that uses them.

    The compiler would fuse the arithmetic of a block's scale into the loop over its elements.
    """
    return lax.optimization_barrier(x)


def pad_last(x: Array, length: int) -> Array:
    """Pads the last axis with zeros to `length`; the array itself where it fits."""
    missing = length - x.shape[-1]
    if not missing:
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def apply_outer(inner: Array, *factors: Array) -> Array:
    """`inner` times the factors of its outer scale, in float32 and in this order.

    A factor is left-aligned with `inner`: scalar, [L] for stacked tensors, or of its rank, with
    one value a row or a block.
    """
    for factor in factors:
        outer = left_aligned(factor, inner.ndim)
        if outer.shape[-1] not in (1, inner.shape[-1]):  # one scale a block
            width = -(-inner.shape[-1] // outer.shape[-1])
            outer = jnp.repeat(outer, width, axis=-1)[..., : inner.shape[-1]]
        inner = inner * outer
    return inner


def left_aligned(x: Array, ndim: int) -> Array:
    """`x` with axes of size 1 appended up to `ndim`, as an outer scale [L] of stacked tensors needs."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def narrow_exact(x: Array, dtype: DTypeLike) -> Array:
    """Casts float32 values of at most eight significant bits, subnormals included."""
    if dtype != jnp.bfloat16:
        return x.astype(dtype)
    upper = (lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


def widen_exact(x: Array, dtype: DTypeLike) -> Array:
    """The inverse of `narrow_exact`: bfloat16 values in `dtype`, subnormals included."""
    if dtype == jnp.bfloat16:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def share_rows(x: Array, rows: int, how: Literal["max", "sum"]) -> Array:
    """Reduces [..., R, C] over groups of `rows` rows and gives every row its group's result.

    A ragged last group is padded with zeros. The sum is taken in a written order.
    """
    if rows == 1:
        return x
    count = -(-x.shape[-2] // rows)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, count * rows - x.shape[-2]), (0, 0)])
    groups = padded.reshape(*x.shape[:-2], count, rows, x.shape[-1])
    total = groups[..., 0, :]
    for i in range(1, rows):
        total = jnp.maximum(total, groups[..., i, :]) if how == "max" else total + groups[..., i, :]
    return jnp.repeat(total, rows, axis=-2)[..., : x.shape[-2], :]


def choices(default: Any, *allowed: Any) -> Any:
    """A dataclass field that admits only the given values; others raise with the nearest one."""
    return dataclasses.field(default=default, metadata={"choices": allowed})
