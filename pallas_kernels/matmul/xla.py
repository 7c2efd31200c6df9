"""The compiler's own matmul on dense operands, accumulated in float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Facts

Array = jax.Array

DENSE = ("float32", "bfloat16")
FP8 = "float8_e4m3fn"


def dense(x: Array, w: Array, *, dims: tuple[int, int] = (1, 1)) -> Array:
    """`reference.matmul` as one dot in the operands' own dtype.

    Error: bfloat16 products are exact in float32, so only the order of the sum differs.
    """
    contracting = (((dims[0],), (dims[1],)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(x, w, contracting, precision=precision, preferred_element_type=jnp.float32)


def fp8(x: Array, w: Array, *, dims: tuple[int, int] = (1, 1)) -> Array:
    """`reference.matmul` on FP8 tensor cores.

    Error: Hopper's FP8 accumulator is narrower than float32. `highest` has partial sums promoted:
    2^-15 of the sum of magnitudes at k = 4096 on an H200, where the default order has 2^-10.
    """
    contracting = (((dims[0],), (dims[1],)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(x, w, contracting, precision=highest, preferred_element_type=jnp.float32)


def refuses_dense(facts: Facts) -> str | None:
    """Both operands float32, or both bfloat16; the order of rows is free."""
    if facts.order != "free":
        return f"its rows depend on how many there are; order is {facts.order!r}"
    if facts.x_dtype != facts.w_dtype or facts.x_dtype not in DENSE:
        return f"needs two operands of one dtype in {DENSE}, got {facts.x_dtype} and {facts.w_dtype}"
    return None


def refuses_fp8(facts: Facts) -> str | None:
    """Two float8_e4m3fn operands on a GPU of compute capability 8.9 or more."""
    if facts.order != "free":
        return f"its rows depend on how many there are; order is {facts.order!r}"
    if (facts.x_dtype, facts.w_dtype) != (FP8, FP8):
        return f"needs two {FP8} operands, got {facts.x_dtype} and {facts.w_dtype}"
    if facts.platform != "gpu" or facts.capability is None or facts.capability < (8, 9):
        return f"needs a GPU of compute capability 8.9, got {facts.platform} {facts.capability}"
    if facts.k % 16 or facts.n % 16:
        return f"needs k and n to be multiples of 16, got k={facts.k}, n={facts.n}"
    return None
