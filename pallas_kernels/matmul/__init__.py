"""Matrix product of two dense operands with float32 accumulation.

`matmul` validates, chooses and calls; `reference.py` is its meaning; `IMPLS` is the written order.
"""

import jax

from pallas_kernels.dispatch import Choice, Facts, Impl, choose
from pallas_kernels.matmul import reference, rows, xla

Array = jax.Array

CPU, H200 = "x86-64 CPU", "NVIDIA H200"
FP8 = xla.FP8

#: The written order of `impl="auto"`; the reference is last and never refuses.
IMPLS = (
    Impl(name="xla_fp8", run=xla.fp8, refuses=xla.refuses_fp8, native=True, verified_on=(H200,)),
    Impl(name="xla", run=xla.dense, refuses=xla.refuses_dense, verified_on=(CPU, H200)),
    Impl(name="rows", run=rows.matmul, refuses=rows.refuses, verified_on=(CPU,)),
    Impl(
        name="reference",
        run=reference.matmul,
        refuses=lambda _: None,
        verified_on=(CPU, H200),
    ),
)


def select(facts: Facts, impl: str = "auto") -> Choice:
    """The implementation that `matmul` takes for these facts; see `dispatch.choose`."""
    return choose(IMPLS, facts, impl)


def matmul(
    x: Array,
    w: Array,
    *,
    facts: Facts,
    dims: tuple[int, int] = (1, 1),
    impl: str = "auto",
) -> Array:
    """Contracts two matrices, accumulating in float32.

    Args:
        x: two axes; w: two axes; float32, bfloat16 or float8_e4m3fn.
        facts: of this call (`shapes_of` fills the shapes in).
        dims: the contracted axis of x and of w; (1, 1) is x [m, k] times w [n, k].
        impl: "auto" or a name of `IMPLS`.

    Returns:
        float32: x's other axis, then w's other axis.

    Raises:
        ValueError: the operands are not matrices or their contracted sizes differ.
        UnsupportedError: the named implementation refuses these facts.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[dims[0]] != w.shape[dims[1]]:
        raise ValueError(f"cannot contract axis {dims[0]} of {x.shape} with axis {dims[1]} of {w.shape}")
    return select(facts, impl).impl.run(x, w, dims=dims)
