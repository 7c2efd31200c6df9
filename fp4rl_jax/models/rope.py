"""Rotary position embedding, rotate-half convention, in float32 (Su et al., 2104.09864)."""

import jax.numpy as jnp
import numpy as np

from fp4rl_jax.arrays import Array
from fp4rl_jax.models.config import ModelConfig, RopeScaling


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


def rotations(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Cosine and sine of every token's rotation.

    Args:
        positions: [...] int32, counting real tokens only.

    Returns:
        Two [..., 1, C/2] float32 arrays that broadcast over heads.
    """
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (i, i + C/2) of each head.

    Args:
        x: [..., H, C]. cos, sin: [..., 1, C/2] float32.

    Returns:
        [..., H, C] float32: the caller rounds once, to its own dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
