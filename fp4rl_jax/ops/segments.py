"""Keys and values of one stretch of time, as attention takes them."""

from typing import NamedTuple

from fp4rl_jax.arrays import Array


class Segment(NamedTuple):
    """Keys and values of one stretch of time.

    Attributes:
        k, v: [P, S, K, C]; B must be a multiple of P, and rows p * B/P .. (p+1) * B/P - 1 of the
            queries share entry p.
        mask: [B, T, S] bool, True where a query sees a key.
    """

    k: Array
    v: Array
    mask: Array
