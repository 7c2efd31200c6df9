"""What a quantization did to its input, counted: underflow, saturation, dead blocks."""

import jax.numpy as jnp
from jax import lax

from fp4rl_jax.arrays import Array
from fp4rl_jax.objectives.means import Sums
from fp4rl_jax.qtensor import QTensor


def quant_stats(x: Array, q: QTensor, *, mask: Array | None = None) -> dict[str, Sums]:
    """Counts what was lost when `x` became `q` (METHODS 7, FP4 extras).

    Args:
        x: [..., K] the quantized array; its last axis is `q`'s quantized axis.
        q: its QTensor.
        mask: [...] bool over the rows, True where a row counts; all by default.

    Returns:
        Sums by name, each a count over a count:
        `underflow`: nonzero inputs whose code is zero, of the nonzero inputs;
        `saturation`: inputs beyond the largest magnitude of their block, of all inputs;
        `zero_scale`: blocks whose scale is zero, of the blocks with a nonzero input.

    Raises:
        ValueError: `q` is not of x's shape with its last axis quantized.
    """
    if q.shape != x.shape or q.axis != -1:
        raise ValueError(f"q of shape {q.shape} and axis {q.axis} does not describe x {x.shape}")
    rows = jnp.ones(x.shape[:-1], bool) if mask is None else jnp.broadcast_to(mask, x.shape[:-1])
    counted = jnp.broadcast_to(rows[..., None], x.shape)
    magnitude = jnp.abs(x.astype(jnp.float32))
    nonzero = (magnitude > 0) & counted
    code_magnitude = q.codes() & ((1 << (q.fmt.code_bits - 1)) - 1)
    outside = counted & ~q.fmt.within(x, q.scales, q.outer_scale)
    dead = lax.bitcast_convert_type(q.fmt.block_scale(q.scales), jnp.int32) == 0  # [..., blocks]
    live = jnp.any(_blocks(nonzero, dead.shape[-1]), axis=-1)
    share = q.fmt.block if q.fmt.block and dead.shape[-1] > 1 else x.shape[-1]
    saturated = outside & ~jnp.repeat(dead, share, axis=-1)[..., : x.shape[-1]]
    return {
        "underflow": _share(nonzero & (code_magnitude == 0), nonzero),
        "saturation": _share(saturated, counted),
        "zero_scale": _share(live & dead, live),
    }


def _blocks(x: Array, count: int) -> Array:
    """[..., K] bool -> [..., count, block], padded with False."""
    missing = -x.shape[-1] % count
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], count, -1)


def _share(hits: Array, among: Array) -> Sums:
    """How many of `among` are `hits`; the total is exact, in two float32 words."""
    number = jnp.sum(hits, dtype=jnp.int32)
    total = number.astype(jnp.float32)
    carry = (number - total.astype(jnp.int32)).astype(jnp.float32)
    return Sums(total=total, count=jnp.sum(among, dtype=jnp.int32), carry=carry)
