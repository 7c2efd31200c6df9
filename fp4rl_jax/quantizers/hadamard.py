"""A fixed randomized Hadamard rotation of 16 elements: x' = x (S H_16 / 4).

H_16 is Sylvester's, S a diagonal of fixed signs, the ones of NVIDIA's NVFP4 recipe (arXiv 2509.25149),
the same for all layers. The rotation is orthogonal, so it cancels in a product of two operands that
are both rotated along the contracted axis: (a R)(b R)^T = a b^T in exact arithmetic.
"""

import jax.numpy as jnp

from fp4rl_jax.arrays import Array

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotate(x: Array, axis: int = -1) -> Array:
    """Rotates runs of 16 along an axis.

    Args:
        x: [...] float32; `axis` has a multiple of 16 elements.

    Returns:
        float32 of x's shape.

    Raises:
        ValueError: the axis is no multiple of 16 long.

    Exact: sixteen additions in a written order, so eager, jit and every batch give the same bits.
    """
    groups, back = _groups(x, axis)
    return back(_hadamard(groups * _signs()) * jnp.float32(0.25))


def unrotate(x: Array, axis: int = -1) -> Array:
    """The inverse of `rotate`, which is its transpose."""
    groups, back = _groups(x, axis)
    return back(_hadamard(groups) * jnp.float32(0.25) * _signs())


def _signs() -> Array:
    return jnp.asarray(SIGNS, jnp.float32)


def _groups(x: Array, axis: int):
    if x.shape[axis] % SIZE:
        raise ValueError(
            f"the rotation takes runs of {SIZE}: axis {axis} of {x.shape} is no multiple of {SIZE}"
        )
    moved = jnp.moveaxis(x, axis, -1)
    return moved.reshape(*moved.shape[:-1], -1, SIZE), lambda y: jnp.moveaxis(
        y.reshape(moved.shape), -1, axis
    )


def _hadamard(x: Array) -> Array:
    """[..., 16] times Sylvester's H_16, by four stages of sums and differences."""
    lead = x.shape[:-1]
    for stage in range(4):
        pairs = x.reshape(*lead, SIZE >> (stage + 1), 2, 1 << stage)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([a + b, a - b], axis=-2).reshape(*lead, SIZE)
    return x
