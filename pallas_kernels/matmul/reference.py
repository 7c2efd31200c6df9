"""The meaning of the matmul: every product in float32, every sum in float32, scales after it."""

import jax
import jax.numpy as jnp

Array = jax.Array


def matmul(x: Array, w: Array, *, dims: tuple[int, int] = (1, 1)) -> Array:
    """Contracts `x` with `w` in float32.

    Args:
        x: two axes, any float dtype; w: likewise.
        dims: the contracted axis of x and of w; (1, 1) is x [m, k] times w [n, k].

    Returns:
        float32: x's other axis, then w's other axis.
    """
    contracting = (((dims[0],), (dims[1],)), ((), ()))
    return jax.lax.dot_general(
        x.astype(jnp.float32),
        w.astype(jnp.float32),
        contracting,
        precision=jax.lax.Precision.HIGHEST,  # TF32 on a GPU otherwise
        preferred_element_type=jnp.float32,
    )
