"""Rotary position embedding, rotate-half convention, in float32 (Su et al., 2104.09864)."""

import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.models.config import ModelConfig, RopeScaling
from fp4rl_jax.ops import pointwise
from fp4rl_jax.ops.spec import Order


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each of the C/2 rotated pairs, [C/2] float32, computed in float64."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = float(config.rope_theta) ** -exponents
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _stretch(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths by `factor`, short ones not, a ramp between."""
    turns = scaling.original_max_length * frequencies / (2 * np.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(ramp, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rotations(positions: Array, config: ModelConfig, *, order: Order = "free") -> tuple[Array, Array]:
    """Cosine and sine of every token's rotation.

    Args:
        positions: [...] int32, counting real tokens only.
        order: "fixed" gives a position the same bits in every batch.

    Returns:
        Two [..., 1, C/2] float32 arrays that broadcast over heads.
    """
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config)
    return pointwise(jnp.cos, angles, order=order), pointwise(jnp.sin, angles, order=order)


def rotate(x: Array, cos: Array, sin: Array, *, order: Order = "free") -> Array:
    """Rotates pairs (i, i + C/2) of each head.

    Args:
        x: [..., H, C]. cos, sin: [..., 1, C/2] float32.
        order: as in `rotations`.

    Returns:
        [..., H, C] float32: the caller rounds once, to its own dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.broadcast_to(cos, first.shape), jnp.broadcast_to(sin, first.shape)
    turned = pointwise(_minus, first, cos, second, sin, order=order)
    return jnp.concatenate([turned, pointwise(_plus, second, cos, first, sin, order=order)], axis=-1)


def _minus(a: Array, b: Array, c: Array, d: Array) -> Array:
    return a * b - c * d


def _plus(a: Array, b: Array, c: Array, d: Array) -> Array:
    return a * b + c * d
