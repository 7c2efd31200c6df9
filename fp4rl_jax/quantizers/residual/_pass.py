"""The second pass: from a quantized activation to the values and scales of what it adds."""

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from fp4rl_jax.arrays import Array, check_name
from fp4rl_jax.formats._base import narrow_exact, once
from fp4rl_jax.quantizers.quantizer import Quantizer
from fp4rl_jax.quantizers.residual._base import Order, Selection
from fp4rl_jax.quantizers.residual._columns import Columns
from fp4rl_jax.quantizers.rounding import Hint, Nearest

#: Values without their outer scale, and the outer scale (None where there is none).
Scaled = tuple[Array, Array | None]
#: An activation's quantizer, its key and hint bound.
Quantized = Callable[[Array], Scaled]


class Correction:
    """What `MatmulSpec.residual` may hold: two operands from one activation, frozen and hashable."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's operands depend on that token (and static data) only."""
        raise NotImplementedError

    @property
    def needs_columns(self) -> bool:
        """Whether `split` needs columns that publish chose."""
        return False

    @property
    def label(self) -> str:
        """What it is, in a table's cell."""
        raise NotImplementedError

    def kept_share(self, length: int) -> float:
        """Share of the second operand's elements of a row of `length` that are not dropped."""
        raise NotImplementedError

    def sums_exactly(self, dtype: DTypeLike, act: Quantizer) -> bool:
        """Whether float32 holds the sum of both operands of an activation of `dtype`, scales included."""
        del dtype, act
        return False

    def split(
        self,
        x: Array,
        act: Quantizer,
        *,
        dtype: DTypeLike,
        columns: Array | None = None,
        key: Array | None = None,
        hint: Hint | None = None,
    ) -> tuple[Scaled, Scaled]:
        """The two operands whose products with the weight are added.

        Args:
            x: [M, K] float32 or bfloat16, the activation.
            act: its quantizer.
            dtype: of the operands.
            columns: [k] int32, ascending, where `needs_columns`.
            key, hint: of `act`.

        Returns:
            First operand [M, K], and second operand [M, K], or [M, k] where columns were given.
        """

        def quantized(a: Array) -> Scaled:
            return act.inner(a, dtype=dtype, key=key, hint=hint)

        return self._split(x, act, quantized, dtype=dtype, columns=columns)

    def _split(
        self, x: Array, act: Quantizer, quantized: Quantized, *, dtype: DTypeLike, columns: Array | None
    ) -> tuple[Scaled, Scaled]:
        """`split`, with `act` as a function that has its key and hint."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(Correction):
    """The quantized residual x - DQ(Q(x)), part of it: QUADS and Rollout-ResQ.

    Attributes:
        selection: which elements.
        quantizer: of the residual.
        order: "select_first" quantizes what is kept (QUADS: Q(R_I)); "quantize_first" keeps part of
            what was quantized (Rollout-ResQ: S(Q(R))). Selections of elements inside a block need
            the second.
        outer: "own" gives the residual outer scales of its own; "shared" reuses the activation's
            (then small residuals may be lost; `quantizer` must have outer="static").
    """

    selection: Selection
    quantizer: Quantizer
    order: Order = "quantize_first"
    outer: Literal["own", "shared"] = "own"

    def __post_init__(self) -> None:
        check_name("order", self.order, get_args(Order))
        check_name("outer", self.outer, ("own", "shared"))
        if self.order == "select_first" and not isinstance(self.selection, Columns):
            raise ValueError(
                f"selection {self.selection.name} looks at quantized values: order must be 'quantize_first'"
            )
        if (self.outer == "shared") != (self.quantizer.fmt.span == "static"):
            raise ValueError(
                f"outer={self.outer!r} does not fit a residual format with outer={self.quantizer.fmt.span!r}:"
                ' expected "static" with "shared" and anything else with "own"'
            )
        if self.quantizer.fmt.block is None or self.quantizer.fmt.span == "block":
            raise ValueError(f"a residual needs a format with block scales, got {self.quantizer.fmt}")

    @property
    def block(self) -> int:
        """Elements that share a block scale."""
        assert self.quantizer.fmt.block is not None  # checked
        return self.quantizer.fmt.block

    @property
    def batch_invariant(self) -> bool:
        return self.selection.batch_invariant and self.quantizer.fmt.span != "tensor"

    @property
    def needs_columns(self) -> bool:
        return self.selection.needs_columns

    @property
    def label(self) -> str:
        if isinstance(self.selection, Columns):
            return f"{self.selection.name} {self.selection.ratio:g} {self.selection.scope}"
        return self.selection.name

    def kept_share(self, length: int) -> float:
        return self.selection.kept_share(length, self.block)

    def sums_exactly(self, dtype: DTypeLike, act: Quantizer) -> bool:
        # six bits each; an element's residual is 0 or no less than 2^-8 of it, and its block's largest no
        # less than that, so that the second's last bit lies within 2^14 of the first's first
        fmt = self.quantizer.fmt
        return _is_narrow(dtype, act) and fmt.code_bits == 4 and fmt.outer_is_power_of_two

    def _split(
        self, x: Array, act: Quantizer, quantized: Quantized, *, dtype: DTypeLike, columns: Array | None
    ) -> tuple[Scaled, Scaled]:
        values, outer = once(quantized(x))  # multiplied, and subtracted from x
        wide = act.seen(x).astype(jnp.float32)
        first = values.astype(jnp.float32)
        if outer is not None:
            first = first * outer
            if not act.fmt.outer_is_power_of_two:  # a rounded product must not contract with the difference
                first = once(first)
        residual = once(_stored(wide - first, x, act))
        shared = outer if self.outer == "shared" else None
        return (values, outer), self.of(residual, wide, dtype=dtype, columns=columns, outer_scale=shared)

    def of(
        self,
        residual: Array,
        x: Array,
        *,
        dtype: DTypeLike,
        columns: Array | None = None,
        outer_scale: Array | None = None,
    ) -> Scaled:
        """Quantizes and selects a residual [M, K]; x [M, K] float32 is for the scores.

        Args:
            residual: float32, or bfloat16 where that holds it exactly.
            x: what it is the residual of.
            dtype: of the result.
            columns: as for `split`.
            outer_scale: the activation's, where it is shared.

        Raises:
            ValueError: the selection needs columns and there are none, or the other way round.
        """
        if (columns is None) == self.needs_columns:
            verb = "needs" if self.needs_columns else "takes no"
            raise ValueError(
                f"selection {self.selection} {verb} columns; a weight published with calibration brings them"
            )
        if columns is not None:
            return self._at(residual, columns, dtype, outer_scale)
        if self.order == "quantize_first":
            values, outer = once(self.quantizer.inner(residual, dtype=dtype, outer_scale=outer_scale))
            mask = self.selection.mask(values.astype(jnp.float32), x, block=self.block)
            return jnp.where(mask, values, jnp.zeros_like(values)), outer
        assert isinstance(self.selection, Columns)  # checked
        if self.selection.unit(self.block) == self.block:  # what is dropped shares no block with what is kept
            mask = self.selection.mask(residual.astype(jnp.float32), x, block=self.block)
            kept = once(jnp.where(mask, residual, jnp.zeros_like(residual)))
            return self.quantizer.inner(kept, dtype=dtype, outer_scale=outer_scale)
        columns = self.selection.chosen(residual.astype(jnp.float32), x, block=self.block)
        values, outer = self._at(residual, columns, dtype, outer_scale)
        return placed(values, columns, residual.shape), outer

    def _at(self, residual: Array, columns: Array, dtype: DTypeLike, outer_scale: Array | None) -> Scaled:
        """The second operand at the given columns [k] or [M, k] only: [M, k]."""

        def taken(a: Array) -> Array:
            if columns.ndim == 1:
                return jnp.take(a, columns, axis=-1)
            return jnp.take_along_axis(a, columns, axis=-1)

        if self.order == "select_first":
            return self.quantizer.inner(taken(residual), dtype=dtype, outer_scale=outer_scale)
        values, outer = self.quantizer.inner(residual, dtype=dtype, outer_scale=outer_scale)
        return taken(values), outer


def _stored(residual: Array, x: Array, act: Quantizer) -> Array:
    """The residual of x in bfloat16 where that loses nothing, in float32 elsewhere."""
    return narrow_exact(residual, jnp.bfloat16) if _is_narrow(x.dtype, act) else residual


def _is_narrow(dtype: DTypeLike, act: Quantizer) -> bool:
    """Whether bfloat16 holds the residual x - v of every x of `dtype` that `act` rounds to v.

    It does where x is bfloat16 and v the nearest of the same few values of at most six significant bits for
    all of a block (not so in HiF4): 0 is one of them, so |x - v| <= |x|, and where v is not 0 it is at least
    |x| / 2, so that its last bit counts no less than x's. (Below 2^-118, where v is subnormal, it may not.)
    """
    nearest = isinstance(act.rounding, Nearest) and act.rotation == "none"
    return dtype == jnp.bfloat16 and nearest and act.fmt.has_ladder and act.fmt.code_bits == 4


def placed(values: Array, columns: Array, shape: tuple[int, ...]) -> Array:
    """[M, k] values put at their columns [k] or [M, k] of a row [M, K] of zeros."""
    columns = jnp.broadcast_to(jnp.atleast_2d(columns), values.shape)
    rows = jnp.arange(shape[0])[:, None]
    return jnp.zeros(shape, values.dtype).at[rows, columns].set(values)


__all__ = ["Correction", "Quantized", "Residual", "Scaled", "placed"]
