"""How a guided rounding stands to the rollout that it follows: what it moved, and what it cannot reach."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import Format
from fp4rl_jax.quantizers._encode import choose_scales
from fp4rl_jax.quantizers.rounding import CompactHint, Guided, Hint


@struct.dataclass
class Agreement:
    """A trainer's values against the rollout's codes of the same tokens.

    Attributes:
        moved: [..., K] bool, the guided value is not the nearest one under the rollout's scales.
        outside: [..., K] bool, the rollout's value is neither of the two that bracket the trainer's, or
            None for a compact hint, from which this does not follow.
        recorded: [...] bool, tokens of which there is a record: see `recorded`.
    """

    moved: Array
    outside: Array | None
    recorded: Array


def recorded(hint: Hint) -> Array:
    """[...] bool, whether the rollout recorded the token: the bytes of one that it did not are all zero.

    A recorded token that is zero throughout counts as not recorded where the format gives it the same
    bytes; either way its codes are zeros.
    """
    if hint.fmt.scale_width:
        return jnp.any(hint.scales != 0, axis=-1)
    if hint.fmt.span == "static":  # which is no token's own
        return jnp.any((hint.bits if isinstance(hint, CompactHint) else hint.packed) != 0, axis=-1)
    assert hint.outer_scale is not None  # a format without block scales has one
    return jnp.any(hint.outer_scale != 0, axis=-1)


@partial(jax.jit, static_argnames="fmt")
def agreement(x: Array, fmt: Format, hint: Hint) -> Agreement:
    """Rounds `x` as `Guided` does and compares values, so that -0 is 0.

    Args:
        x: [..., K] float32 or bfloat16, quantized along its last axis.
        fmt: the format of both sides.
        hint: the rollout's, of the same shape.

    Raises:
        ValueError: the hint is of another format, axis or shape.
    """
    ours = choose_scales(x, fmt, Guided(), axis=-1, key=None, hint=hint, outer_scale=None, axis_name=None)
    nearest = fmt.encode(ours.x, hint.scales, hint.outer_scale)
    value = fmt.element(ours.codes(fmt))

    def differs(codes: Array) -> Array:
        return (value != fmt.element(codes))[..., : x.shape[-1]]

    full = not isinstance(hint, CompactHint)
    return Agreement(
        moved=differs(nearest),
        outside=differs(fmt.unpack(hint.packed)) if full else None,
        recorded=recorded(hint),
    )
