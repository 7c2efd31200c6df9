"""The compiler's ragged dot, accumulated in float32."""

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers, ragged_dot_general

from pallas_kernels.dispatch import Facts
from pallas_kernels.matmul import xla as matmul_xla

Array = jax.Array


def grouped_matmul(x: Array, w: Array, group_sizes: Array, *, axis: int = 2) -> Array:
    """`reference.grouped_matmul` as one ragged dot in the operands' dtype."""
    numbers = RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (axis,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return ragged_dot_general(
        x,
        w,
        group_sizes,
        numbers,
        precision=_precision(x),
        preferred_element_type=jnp.float32,
    )


def grouped_outer(a: Array, b: Array, group_sizes: Array) -> Array:
    """`reference.grouped_outer` as one ragged dot in the operands' dtype."""
    numbers = RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return ragged_dot_general(
        a,
        b,
        group_sizes,
        numbers,
        precision=_precision(a),
        preferred_element_type=jnp.float32,
    )


def refuses(facts: Facts) -> str | None:
    """As the dense dot: one dtype, free order."""
    return matmul_xla.refuses_dense(facts)


def _precision(x: Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
