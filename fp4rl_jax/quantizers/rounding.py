"""Which neighbour on the grid a value takes: nearest, at random, or as a rollout did.

Rounding objects are static; randomness (`key`) and hints are array arguments of `quantize`.
"""

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import Bracket, Format, to_nearest
from fp4rl_jax.formats._base import RoundingFn, once
from fp4rl_jax.qtensor import QTensor


@struct.dataclass
class CompactHint:
    """One bit an element of a rollout's codes, and its scales (TRACE, section 4.2).

    The bit is the lowest of the magnitude code. Neighbouring codes differ in it, so it picks
    between the two that bracket a value: 1.5 bits a value for NVFP4 instead of 4.5.

    Attributes:
        bits: [..., padded N / 8] uint8, element 0 in the lowest bit.
        scales, outer_scale, fmt, axis, padding: as in `QTensor`.
    """

    bits: Array
    scales: Array
    outer_scale: Array | None
    fmt: Format = struct.field(pytree_node=False)
    axis: int = struct.field(pytree_node=False, default=-1)
    padding: int = struct.field(pytree_node=False, default=0)

    @property
    def length(self) -> int:
        """Values along the quantized axis, padding left out."""
        return self.bits.shape[-1] * 8 - self.padding


Hint = QTensor | CompactHint


def compact(q: QTensor) -> CompactHint:
    """What of a rollout's codes compact guidance needs: one bit an element, and the scales."""
    low = (q.fmt.unpack(q.packed) & 1).astype(jnp.int32)
    groups = low.reshape(*low.shape[:-1], low.shape[-1] // 8, 8)
    bits = (groups << jnp.arange(8)).sum(axis=-1).astype(jnp.uint8)
    return CompactHint(bits, q.scales, q.outer_scale, fmt=q.fmt, axis=q.axis, padding=q.padding)


class Rounding(Protocol):
    """What a quantizer asks of a rounding; a frozen dataclass.

    Attributes:
        borrows_scales: whether the scales are the hint's instead of the array's own.
    """

    borrows_scales: ClassVar[bool]

    def prepare(
        self, shape: tuple[int, ...], fmt: Format, key: Array | None, hint: Hint | None
    ) -> RoundingFn:
        """A function from brackets of blocks [..., blocks, block] and signs to magnitude codes.

        Args:
            shape: of the blocked array.
            fmt: the format.
            key, hint: what the caller passed.

        Raises:
            ValueError: the rounding needs a key or a hint and there is none.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Nearest:
    """To the nearest code, ties by the format's own rule. Ignores key and hint."""

    borrows_scales: ClassVar[bool] = False

    def prepare(
        self, shape: tuple[int, ...], fmt: Format, key: Array | None, hint: Hint | None
    ) -> RoundingFn:
        del shape, fmt, key, hint
        return to_nearest


@dataclasses.dataclass(frozen=True)
class Stochastic:
    """Up or down at random, in proportion to the distance: unbiased where nothing is clipped.

    Formats clip a block's maximum when its scale is rounded to nearest, so pair it with
    `scale_rounding="up"`.

    Attributes:
        bits: random bits a value, 16 to 22; fewer would bias by up to half of 2^-bits of a step.
    """

    bits: int = 16
    borrows_scales: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 16 <= self.bits <= 22:
            raise ValueError(f"stochastic rounding takes 16 to 22 random bits a value, got {self.bits}")

    def prepare(
        self, shape: tuple[int, ...], fmt: Format, key: Array | None, hint: Hint | None
    ) -> RoundingFn:
        del fmt, hint
        if key is None:
            raise ValueError("stochastic rounding needs key=, a PRNG key, and got None")
        random_bits = once(jax.random.bits(key, shape, jnp.uint32))
        return lambda bracket, negative: bracket.random(random_bits, self.bits)


@dataclasses.dataclass(frozen=True)
class Guided:
    """Towards a rollout's codes, under the rollout's scales (TRACE, arXiv 2610.07767, section 4).

    Of the two codes that bracket a value, takes the one nearer to the code that the rollout used
    for the same token, so |q - q_rollout| <= |nearest - q_rollout| always, and q = q_rollout
    whenever the rollout's code is one of the two. The hint is the rollout's QTensor (full
    guidance) or `compact` of it; compact equals full whenever the rollout's code is one of the two.
    """

    borrows_scales: ClassVar[bool] = True

    def prepare(
        self, shape: tuple[int, ...], fmt: Format, key: Array | None, hint: Hint | None
    ) -> RoundingFn:
        del key
        if hint is None:
            raise ValueError("guided rounding needs hint=, a rollout's QTensor or CompactHint, and got None")
        if isinstance(hint, CompactHint):
            flags = (hint.bits[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
            parity = flags.reshape(shape).astype(jnp.int32)
            return lambda bracket, negative: _by_parity(bracket, parity)
        codes = fmt.unpack(hint.packed).reshape(shape).astype(jnp.int32)
        return lambda bracket, negative: _towards(bracket, negative, codes, fmt)


def _towards(bracket: Bracket, negative: Array, codes: Array, fmt: Format) -> Array:
    sign_bit = 1 << (fmt.code_bits - 1)
    target = codes & (sign_bit - 1)
    same_side = ((codes & sign_bit) != 0) == negative
    lower = bracket.lower()
    up = same_side & (target > lower) & ~bracket.exact()
    return lower + up.astype(jnp.int32)


def _by_parity(bracket: Bracket, parity: Array) -> Array:
    lower = bracket.lower()
    up = ((lower & 1) != parity) & ~bracket.exact()
    return lower + up.astype(jnp.int32)
