"""Attention whose every query is computed alone, in one written order of sums.

A loop runs the same body for each (row, time) query: products element by element, sums by
halving trees. Neither the other queries nor their number can reach a query's result, so a decode
step equals the same column of a whole block. It costs several times the free order and exists to
prove equalities.
"""

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from fp4rl_jax.arrays import Array
from fp4rl_jax.ops.rounding import round_to, settle, tree_sum
from fp4rl_jax.ops.segments import Segment


def attention_fixed(q: Array, segments: tuple[Segment, ...], scale: float) -> Array:
    """`attention` with a fixed order: q [B, T, H, C] -> [B, T, H, C] in q's dtype."""
    b, t, h, c = q.shape

    def one_query(args: tuple[Array, Array, tuple[Array, ...]]) -> Array:
        row, query, masks = args
        keys = [_entry(s.k, row * s.k.shape[0] // b) for s in segments]
        values = [_entry(s.v, row * s.v.shape[0] // b) for s in segments]
        return _one_query(query, keys, values, masks, scale)

    rows = jnp.repeat(jnp.arange(b), t)
    masks = tuple(s.mask.reshape(b * t, -1) for s in segments)
    out = jax.lax.map(one_query, (rows, q.reshape(b * t, h, c), masks))
    return out.reshape(b, t, h, c)


def _entry(array: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)  # [K, S, C]


def _one_query(q: Array, keys: list[Array], values: list[Array], masks, scale: float) -> Array:
    """q [H, C], each of keys and values [K, S, C], each of masks [S] -> [H, C]."""
    h, c = q.shape
    heads = keys[0].shape[0]
    k = jnp.concatenate(keys, axis=1).astype(jnp.float32)
    v = jnp.concatenate(values, axis=1).astype(jnp.float32)
    mask = jnp.concatenate(masks)
    grouped, k, v = optimization_barrier((q.astype(jnp.float32).reshape(heads, h // heads, 1, c), k, v))
    scores = tree_sum(grouped * k[:, None]) * scale  # [K, G, S]
    scores = optimization_barrier(jnp.where(mask, scores, -jnp.inf))
    highest = jnp.max(scores, axis=-1, keepdims=True)
    highest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights = optimization_barrier(jnp.exp(optimization_barrier(scores - highest)))
    total = tree_sum(weights)[..., None]
    weights = round_to(weights, q.dtype)
    mixed = tree_sum(weights[..., None, :] * jnp.swapaxes(v, 1, 2)[:, None])  # [K, G, C]
    out = mixed / jnp.where(total > 0, total, 1.0)
    return optimization_barrier(settle(out.reshape(h, c), q.dtype))
