"""What a quantization did to its input: underflow, saturation, dead blocks, error."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from fp4rl_jax.arrays import Array, as_rows
from fp4rl_jax.objectives.means import Sums
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Hint, Quantizer, Stochastic
from fp4rl_jax.quantizers.error_split import error_split
from fp4rl_jax.quantizers.guidance import agreement

#: What a forward counts: nothing; the activations of one token in `TOKEN_STRIDE`; everything that it
#: quantizes, weights included.
Stats = Literal["off", "sampled", "on"]

#: Of the tokens of a call, in the order of its rows, every how manieth "sampled" counts. A prime, so that
#: it does not keep hitting the same column of a batch.
TOKEN_STRIDE = 13

#: Sampled tokens of a call up to which every layer keeps them, to be counted at once for all layers.
MOST_KEPT = 128


@struct.dataclass
class Kept:
    """Tokens of one site that are counted later.

    Attributes:
        x: [..., K] activations before they are quantized.
        mask: [...] bool, True on real tokens.
    """

    x: Array
    mask: Array


def keep(x: Array, quantizer: Quantizer, *, mask: Array) -> Kept | None:
    """The tokens that `act_stats` counts with "sampled"; None where it has to count them itself.

    Counting takes some twenty operations on a few rows. Where a call has few tokens (a decode step) they
    take longer layer by layer than once for all layers, in `kept_stats`.

    Args:
        x: [..., K] activations. quantizer: of the activations. mask: [...] bool.
    """
    tokens = math.prod(x.shape[:-1])
    alone = _by_token(quantizer) and not isinstance(quantizer.rounding, Stochastic)
    if not alone or tokens > MOST_KEPT * TOKEN_STRIDE:
        return None
    x, mask, _ = _counted(x, quantizer, mask, None, stats="sampled")
    return Kept(x=x, mask=mask)


def kept_stats(kept: Kept, quantizer: Quantizer) -> dict[str, Sums]:
    """What `act_stats` finds in the kept tokens of all layers: x [..., K], mask [...]. Counts are exact, so
    they are the sums of what it would have found layer by layer; those of squares are up to rounding."""
    seen, q = quantizer.seen(kept.x), quantizer.quantize(kept.x, axis=-1)
    return quant_stats(seen, q, mask=kept.mask)


def quant_stats(x: Array, q: QTensor, *, mask: Array | None = None) -> dict[str, Sums]:
    """Counts what was lost when `x` became `q`.

    Args:
        x: [..., K] the quantized array; its last axis is `q`'s quantized axis.
        q: its QTensor.
        mask: [...] bool over the rows, True where a row counts; all by default.

    Returns:
        Sums by name, the first three a float32 count over a float32 count (see `count_true`):
        `underflow`: nonzero inputs whose code is zero, of the nonzero inputs;
        `saturation`: inputs beyond the largest magnitude of their block, of all inputs;
        `zero_scale`: blocks whose scale is zero, of the blocks with a nonzero input;
        and `error`, the sum of squares of `q` less x over that of x.

    Raises:
        ValueError: `q` is not of x's shape with its last axis quantized.
    """
    if q.shape != x.shape or q.axis != -1:
        raise ValueError(f"q of shape {q.shape} and axis {q.axis} does not describe x {x.shape}")
    rows = jnp.ones(x.shape[:-1], bool) if mask is None else jnp.broadcast_to(mask, x.shape[:-1])
    counted = jnp.broadcast_to(rows[..., None], x.shape)
    nonzero = (x != 0) & counted
    code_magnitude = q.codes() & ((1 << (q.fmt.code_bits - 1)) - 1)
    scale_bits = lax.bitcast_convert_type(q.fmt.block_scale(q.scales), jnp.int32)
    dead = jnp.broadcast_to(scale_bits == 0, (*x.shape[:-1], scale_bits.shape[-1]))  # [..., blocks]
    block = (q.fmt.block if q.fmt.scale_width else None) or x.shape[-1]  # FP8 has no scale bytes
    in_dead = jnp.repeat(dead, block, axis=-1)[..., : x.shape[-1]]
    beyond = ~q.fmt.within(x, q.scales, q.outer_scale) & ~in_dead
    live = jnp.any(_blocks(nonzero, dead.shape[-1], block), axis=-1)
    return {
        "underflow": _share(nonzero & (code_magnitude == 0), nonzero),
        "saturation": _share(counted & beyond, counted),
        "zero_scale": _share(live & dead, live),
        "error": _relative_error(x, q, counted),
    }


def act_stats(
    x: Array,
    quantizer: Quantizer,
    *,
    mask: Array,
    stats: Stats,
    key: Array | None = None,
    hint: Hint | None = None,
) -> dict[str, Sums]:
    """Counts what quantizing activations loses.

    Args:
        x: [..., K] activations.
        quantizer: of the activations.
        mask: [...] bool, True on real tokens.
        stats: "on" counts every real token and splits the error (`error_shares`), "sampled" counts one
            token in `TOKEN_STRIDE`. The codes of a token depend on itself alone, so those that are counted
            are the ones the matmul used, stochastic rounding apart, which draws anew for a sample.
        key: of a stochastic quantizer.
        hint: of a guided one, in the layout of x.

    Returns:
        As `quant_stats`, and as `error_shares` with "on".
    """
    x, mask, hint = _counted(x, quantizer, mask, hint, stats=stats)
    seen, q = quantizer.seen(x), quantizer.quantize(x, axis=-1, key=key, hint=hint)
    found = quant_stats(seen, q, mask=mask)
    return found | error_shares(seen, q, mask=mask) if stats == "on" else found


def error_shares(x: Array, q: QTensor, *, mask: Array | None = None) -> dict[str, Sums]:
    """Where the error of a format with power-of-two block scales comes from; nothing for other formats.

    Args:
        x, q, mask: as in `quant_stats`.

    Returns:
        Sums by name, each of squares over the sum of x^2: `scale_bias`, `dead_zone`, `grid_noise`, which
        add up to the relative squared error; see `quantizers.error_split`.
    """
    if not q.fmt.power_of_two_scale:
        return {}
    split = error_split(x, q, mask=mask)
    parts = {"scale_bias": split.scale_bias, "dead_zone": split.dead_zone, "grid_noise": split.grid}
    zero = jnp.zeros([], jnp.float32)
    return {name: Sums(total=part, count=split.signal, carry=zero) for name, part in parts.items()}


def guided_stats(x: Array, quantizer: Quantizer, hint: Hint, *, mask: Array, stats: Stats) -> dict[str, Sums]:
    """Counts what a rollout's guidance does to activations, and what it cannot do.

    Args:
        x, mask, stats: as in `act_stats`; of the tokens in the mask, those that the rollout recorded count.
        quantizer: a guided one.
        hint: in the layout of x.

    Returns:
        Sums by name, of all values: `guided`: those that are rounded to another code than the nearest
        under the rollout's scales; with a full hint, `outside`: those that no rounding up or down brings
        to the rollout's value. One bit an element does not tell which these are.
    """
    x, mask, seen = _counted(x, quantizer, mask, hint, stats=stats)
    assert seen is not None
    found = agreement(x, quantizer.fmt, seen)
    counted = jnp.broadcast_to((mask & found.recorded)[..., None], x.shape)
    shares = {"guided": _share(found.moved & counted, counted)}
    if found.outside is not None:
        shares["outside"] = _share(found.outside & counted, counted)
    return shares


def _counted(
    x: Array, quantizer: Quantizer, mask: Array, hint: Hint | None, *, stats: Stats
) -> tuple[Array, Array, Hint | None]:
    """The tokens [..., K] that are counted, which of them are real, and their hints."""
    x, mask = jax.lax.stop_gradient(x), jnp.broadcast_to(mask, x.shape[:-1])
    if stats != "sampled" or not _by_token(quantizer):
        return x, mask, hint
    x, hint = jax.tree.map(lambda leaf: as_rows(leaf)[::TOKEN_STRIDE], (x, hint))
    return x, mask.reshape(-1)[::TOKEN_STRIDE], hint


def _by_token(quantizer: Quantizer) -> bool:
    """Whether a token's codes follow from the token alone, so that a sample has the same ones."""
    return quantizer.fmt.span != "tensor" and quantizer.fmt.block_rows == 1


def _blocks(x: Array, count: int, block: int) -> Array:
    """[..., K] bool -> [..., count, block], padded with False."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * block - x.shape[-1])])
    return x.reshape(*x.shape[:-1], count, block)


def _share(hits: Array, among: Array) -> Sums:
    """How many of `among` are `hits`."""
    return Sums(total=count_true(hits), count=count_true(among), carry=jnp.zeros([], jnp.float32))


def _relative_error(x: Array, q: QTensor, counted: Array) -> Sums:
    """Energy of the error over that of x, where `counted` [..., K]; both 0 where x is."""
    wide = x.astype(jnp.float32)
    error = jnp.where(counted, q.dequantize() - wide, 0.0)
    energy = jnp.where(counted, wide, 0.0)
    return Sums(
        total=jnp.sum(error * error), count=jnp.sum(energy * energy), carry=jnp.zeros([], jnp.float32)
    )


def count_true(x: Array) -> Array:
    """[] float32, how many of x [..., K] are True.

    Exact up to 2^24 and rounded to 24 bits beyond. An int32 would end at 2^31, which one site of all
    layers of a model of 8 billion weights passes.
    """
    by_row = jnp.sum(x, axis=-1, dtype=jnp.int32)
    return jnp.sum(by_row.astype(jnp.float32))
