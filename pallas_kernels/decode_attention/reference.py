"""What `decode_attention` means: one layer taken out, both segments joined, softmax in float32."""

import jax
import jax.numpy as jnp

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
    """q [B, H, C] over [L, B, K, S, C] and [L, P, K, T, C]: [B, H, C] in q's dtype."""
    b, h, c = q.shape
    repeats = b // starts.shape[0]

    def joined(own: Array, shared: Array) -> Array:
        both = jnp.concatenate([jnp.repeat(shared[layer], repeats, axis=0), own[layer]], axis=2)
        return both.astype(jnp.float32)  # [B, K, T + S, C]

    k, v = (joined(own, shared) for own, shared in zip(cache, prompt, strict=True))
    width = prompt[0].shape[3]
    column = jnp.arange(k.shape[2])[None]
    before = (column >= jnp.repeat(starts, repeats)[:, None]) & (column < width)
    own = (column >= width) & (column - width < lengths[:, None])
    grouped = q.astype(jnp.float32).reshape(b, k.shape[1], -1, c)
    scores = jnp.einsum("bkgc,bksc->bkgs", grouped, k, precision="highest") * scale
    scores = jnp.where((before | own)[:, None, None], scores, -jnp.inf)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bkgs,bksc->bkgc", weights, v, precision="highest") / jnp.where(total > 0, total, 1.0)
    return out.reshape(b, h, c).astype(q.dtype)
