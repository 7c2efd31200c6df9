"""Keys and values as the cache holds them: as they are, or quantized along head_dim when written.

A quantized cache is packed: codes and block scales of every token, and an outer scale that is static, one
power of two for each layer and KV head (TRACE, arXiv 2610.07767). All tokens of a call attend to the values
that the cache stands for, their own included, so that prefill, decoding and scoring see the same ones.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from fp4rl_jax import formats, ops
from fp4rl_jax.arrays import Array, dtype_of
from fp4rl_jax.formats import bits
from fp4rl_jax.models.config import ModelConfig
from fp4rl_jax.objectives.means import Sums
from fp4rl_jax.ops.spec import Form, Side
from fp4rl_jax.ops.stats import TOKEN_STRIDE
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers import Hint, Quantizer, compact

#: The cache among calibrations (the largest magnitudes), records and statistics.
NAME = "kv"
#: Its static outer scales among hints and records.
SCALES = "kv/outer"

#: Publish keeps the largest magnitude seen this many times below the largest that the scales can hold: the
#: next tokens may be larger, and a binade of E4M3's seventeen costs nothing.
HEADROOM = 2.0


@struct.dataclass
class KV:
    """Keys (after RoPE) and values.

    Attributes:
        k, v: of cached tokens, [L, B, K, S, C] in the activation dtype, or packed QTensors of that shape.
            The same pair holds their largest magnitudes and outer scales, [L, K] float32.
    """

    k: Array | QTensor
    v: Array | QTensor


@dataclasses.dataclass(frozen=True)
class Cached:
    """Keys and values of a call's tokens in one layer, and what the cache makes of them.

    Both are quantized in one call, stacked.

    Attributes:
        k, v: [B, T, K, C] in the activation dtype.
        quantizer: of the cache, or None.
        outer: [2, 1, 1, K, 1] float32, their static outer scales, or None.
        hint: the rollout's record of the same tokens, leaves [2, B, T, K, ...], or None.
    """

    k: Array
    v: Array
    quantizer: Quantizer | None = None
    outer: Array | None = None
    hint: Hint | None = None

    def by_token(self) -> tuple[Array, Array]:
        """Keys and values [B, T, K, C] that attention reads, differentiable (straight through)."""
        if self.quantizer is None:
            return self.k, self.v
        both = jnp.stack([self.k, self.v])
        both = self.quantizer.fake_quantize(both, axis=-1, hint=self.hint, outer_scale=self.outer)
        return both[0], both[1]

    def by_head(self) -> tuple[Array, Array]:
        """The same, [B, K, T, C]."""
        k, v = self.by_token()
        return ops.by_head(k), ops.by_head(v)

    def stored(self) -> KV:
        """Both as the cache keeps them, [B, K, T, C]; every leaf by head, a static scale [1, K, 1, 1]."""
        if self.quantizer is None:
            return KV(k=ops.by_head(self.k), v=ops.by_head(self.v))
        q = self._packed()
        k, v = (jax.tree.map(lambda leaf, i=i: ops.by_head(leaf[i]), q) for i in range(2))
        return KV(k=k, v=v)

    def record(self, form: Form) -> Hint:
        """What guides a trainer: leaves [B, T, 2, K, ...]; static scales are left out."""
        q = self._packed()
        if q.fmt.span == "static":
            q = dataclasses.replace(q, outer_scale=None)
        q = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 2), q)
        return compact(q) if form == "compact" else q

    def stats(self, *, mask: Array, stats: ops.Stats) -> dict[str, dict[str, Sums]]:
        """Quantization statistics of the real tokens in `mask` [B, T]: see `ops.act_stats`."""
        assert self.quantizer is not None
        every = 1 if stats == "on" else TOKEN_STRIDE

        def some(leaf: Array) -> Array:
            return leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:3]), *leaf.shape[3:])[:, ::every]

        x = some(jax.lax.stop_gradient(jnp.stack([self.k, self.v])))  # [2, N, K, C]
        real = some(mask[None])[..., None]
        outer = None if self.outer is None else self.outer[:, 0]
        if self.hint is None:
            q = self.quantizer.quantize(x, axis=-1, outer_scale=outer)
            return {"act": ops.quant_stats(x, q, mask=real)}
        hint = dataclasses.replace(self.hint, outer_scale=None) if outer is not None else self.hint
        hint = jax.tree.map(some, hint)
        hint = dataclasses.replace(hint, outer_scale=outer) if outer is not None else hint
        q = self.quantizer.quantize(x, axis=-1, hint=hint)
        guided = ops.guided_stats(x, self.quantizer, hint, mask=real, stats="on")
        return {"act": ops.quant_stats(x, q, mask=real), "guided": guided}

    def _packed(self) -> QTensor:
        assert self.quantizer is not None
        both = jax.lax.stop_gradient(jnp.stack([self.k, self.v]))
        return self.quantizer.quantize(both, axis=-1, hint=self.hint, outer_scale=self.outer)


def cached(
    k: Array, v: Array, quantizer: Quantizer | None, *, scales: KV | None = None, record: Hint | None = None
) -> Cached:
    """Keys and values [B, T, K, C] under a side's quantizer.

    Args:
        k, v: in the activation dtype.
        quantizer: the side's. A static outer scale that is not given is one a token and head instead; a
            guided rounding without a record is to nearest.
        scales: static outer scales, leaves [K] float32, or None.
        record: as `Cached.record` makes it, or None.
    """
    if quantizer is None:
        return Cached(k, v)
    outer = None
    if quantizer.fmt.span == "static":
        if scales is None:
            quantizer = dataclasses.replace(quantizer, fmt=formats.make(quantizer.fmt, outer="row"))
        else:
            outer = jnp.stack(jax.tree.leaves(scales))[:, None, None, :, None]
    if not quantizer.rounding.borrows_scales or record is None:
        return Cached(k, v, ops.unguided(quantizer), outer)
    hint = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 2, 0), record)
    return Cached(
        k, v, quantizer, outer, hint if outer is None else dataclasses.replace(hint, outer_scale=outer)
    )


def decoded(stored: Array | QTensor, dtype: jnp.dtype) -> Array:
    """The values of a cache, or of a layer of it, as attention reads them."""
    return stored.dequantize(dtype) if isinstance(stored, QTensor) else stored


def write(cache: KV, new: KV, *, layer: Array, column: Array) -> KV:
    """Writes one layer's new tokens [B, K, T, C] into a cache [L, B, K, S, C] at `column`.

    A static scale has one column, to which the update is clamped: it is written over with itself.
    """

    def one(kept: Array, fresh: Array) -> Array:
        start = (layer, 0, 0, column, 0)
        return jax.lax.dynamic_update_slice(kept, fresh[None].astype(kept.dtype), start)

    return jax.tree.map(one, cache, new)


def cache_width(completion_width: int) -> int:
    """Columns of a completion's KV segment: its last token is never fed back."""
    return max(completion_width - 1, 1)


def new_cache(
    config: ModelConfig,
    *,
    num_rows: int,
    completion_width: int,
    dtype: str,
    quantizer: Quantizer | None = None,
    columns: int | None = None,
) -> KV:
    """An empty completion cache [L, B, K, columns, C]; packed where there is a quantizer.

    It has `cache_width` columns unless told.
    """
    columns = cache_width(completion_width) if columns is None else columns
    shape = (num_rows, columns, config.num_kv_heads, config.head_dim)
    x = jax.ShapeDtypeStruct(shape, dtype_of(dtype))
    scale = jax.ShapeDtypeStruct((config.num_kv_heads,), jnp.float32)
    layer = jax.eval_shape(
        lambda x, scale: cached(x, x, quantizer, scales=KV(k=scale, v=scale)).stored(), x, scale
    )
    return jax.tree.map(lambda leaf: jnp.zeros((config.num_layers, *leaf.shape), leaf.dtype), layer)


def decode_columns(width: int, config: ModelConfig, side: Side) -> int:
    """Columns that a decode step wants for `width` tokens: more only where a kernel reads whole steps."""
    heads = config.num_heads, config.num_kv_heads
    return ops.cache_columns(width, side, heads=heads, head_dim=config.head_dim)


def filled_up(kv: KV, mask: Array, columns: int) -> tuple[KV, Array]:
    """A prompt cache [L, P, K, T, C] and its mask [P, T] with padding in front, `columns` in all."""
    missing = columns - mask.shape[1]
    if not missing:
        return kv, mask
    kv = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (missing, 0), (0, 0))), kv)
    return kv, jnp.pad(mask, ((0, 0), (missing, 0)))


def token_bytes(config: ModelConfig, quantizer: Quantizer | None, *, dtype: str) -> int:
    """Bytes that a cached token takes over all layers, static scales left out.

    2 L K times: head_dim elements, the format's scale bytes for every block, and four bytes where it has
    an outer scale a row; head_dim is filled up to whole blocks.
    """
    width = config.head_dim
    if quantizer is None:
        return 2 * config.num_layers * config.num_kv_heads * width * jnp.dtype(dtype_of(dtype)).itemsize
    one = row_bytes(quantizer, width, quantizer.fmt.code_bits)
    return 2 * config.num_layers * config.num_kv_heads * one


def row_bytes(quantizer: Quantizer, width: int, element_bits: int) -> int:
    """Bytes of a row of `width` values: elements, block scales, and the row's outer scale if it has one."""
    fmt = quantizer.fmt
    block = fmt.block or width
    blocks = math.ceil(width / block)
    outer = 4 if fmt.span == "row" else 0
    return blocks * block * element_bits // 8 + blocks * fmt.scale_width + outer


def magnitudes(k: Array, v: Array, mask: Array) -> KV:
    """Largest finite magnitudes of keys and values [B, T, K, C] over the tokens in `mask`: [K] each."""

    def one(x: Array) -> Array:
        x = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
        counted = mask[..., None, None] & jnp.isfinite(x)
        return jnp.max(jnp.where(counted, x, 0.0), axis=(0, 1, 3))

    return KV(k=one(k), v=one(v))


def outer_scales(largest: KV, quantizer: Quantizer) -> KV:
    """Static outer scales from the largest magnitudes seen, leaves [L, K]: powers of two.

    The smallest under which `HEADROOM` times the largest magnitude is not clipped, by the format's own
    rule; 1 where nothing was seen.
    """

    def one(amax: Array) -> Array:
        return quantizer.fmt.outer_from_amax(bits.raw(amax.astype(jnp.float32) * HEADROOM))

    return jax.tree.map(one, largest)
