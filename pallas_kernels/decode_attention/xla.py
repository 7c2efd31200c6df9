"""Decode attention by the compiler's dots: the layer is sliced out of the stack, which XLA copies."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Facts

Array = jax.Array


def decode_attention(
    q: Array,
    cache: tuple[Array, Array],
    prompt: tuple[Array, Array],
    *,
    layer: Array,
    lengths: Array,
    starts: Array,
    scale: float,
) -> Array:
    """`reference.decode_attention` as a dot for each segment; probabilities in q's dtype, sums in float32."""
    b, h, c = q.shape
    p, heads, width = prompt[0].shape[1:4]
    own_k, own_v, pre_k, pre_v = (
        lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (*cache, *prompt)
    )
    shared = q.reshape(p, b // p, heads, h // heads, c)
    before = _dot("pnkgc,pksc->pnkgs", shared, pre_k) * scale
    before = jnp.where(jnp.arange(width) >= starts[:, None, None, None, None], before, -jnp.inf)
    own = _dot("bkgc,bksc->bkgs", q.reshape(b, heads, h // heads, c), own_k) * scale
    own = jnp.where(jnp.arange(own.shape[-1]) < lengths[:, None, None, None], own, -jnp.inf)
    scores = jnp.concatenate([before.reshape(*own.shape[:3], width), own], axis=-1)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = weights.sum(axis=-1)
    weights = weights.astype(q.dtype)
    first = weights[..., :width].reshape(p, b // p, heads, h // heads, width)
    out = _dot("pnkgs,pksc->pnkgc", first, pre_v).reshape(b, heads, -1, c)
    out += _dot("bkgs,bksc->bkgc", weights[..., width:], own_v)
    return (out / jnp.where(total > 0, total, 1.0)[..., None]).reshape(b, h, c).astype(q.dtype)


def refuses(facts: Facts) -> str | None:
    """Free order only."""
    return None if facts.order == "free" else f"sums in free order, but order is {facts.order!r}"


def _dot(product: str, x: Array, y: Array) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(product, x, y, precision=precision, preferred_element_type=jnp.float32)
