"""Keys and values of one stretch of time, as attention takes them."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from fp4rl_jax.arrays import Array

#: What is known of the masks of a call: nothing, or that no query sees a later column. The queries are then
#: the last T of the columns of all segments together. Implementations may skip what no mask lets through.
Span = Literal["any", "causal"]


class Segment(NamedTuple):
    """Keys and values of one stretch of time.

    Attributes:
        k, v: [P, K, S, C], each head's keys together, as its dot reads them; B must be a multiple of
            P, and rows p * B/P .. (p+1) * B/P - 1 of the queries share entry p.
        mask: [B, T, S] bool, True where a query sees a key.
    """

    k: Array
    v: Array
    mask: Array


def by_head(x: Array) -> Array:
    """Keys or values of tokens as a segment holds them: [B, S, K, C] -> [B, K, S, C]."""
    return jnp.swapaxes(x, 1, 2)
