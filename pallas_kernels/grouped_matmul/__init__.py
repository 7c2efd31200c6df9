"""Matrix product of sorted rows with the weight of their group (mixture of experts)."""

import jax

from pallas_kernels.dispatch import Choice, Facts, Impl, choose
from pallas_kernels.grouped_matmul import reference, rows, xla
from pallas_kernels.matmul import CPU, H200

Array = jax.Array

#: The written order of `grouped_matmul`; the reference is last and never refuses.
IMPLS = (
    Impl(name="xla", run=xla.grouped_matmul, refuses=xla.refuses, verified_on=(CPU, H200)),
    Impl(name="rows", run=rows.grouped_matmul, refuses=rows.refuses, verified_on=(CPU,)),
    Impl(
        name="reference",
        run=reference.grouped_matmul,
        refuses=lambda _: None,
        verified_on=(CPU, H200),
    ),
)

#: The written order of `grouped_outer`, the weight gradient.
OUTER_IMPLS = (
    Impl(name="xla", run=xla.grouped_outer, refuses=xla.refuses, verified_on=(CPU, H200)),
    Impl(
        name="reference",
        run=reference.grouped_outer,
        refuses=lambda _: None,
        verified_on=(CPU, H200),
    ),
)


def select(facts: Facts, impl: str = "auto") -> Choice:
    """The implementation that `grouped_matmul` takes for these facts."""
    return choose(IMPLS, facts, impl)


def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    facts: Facts,
    axis: int = 2,
    impl: str = "auto",
) -> Array:
    """Multiplies every row by the weight of its group.

    Args:
        x: [m, k], rows sorted by group; w: [g, n, k], or [g, k, n] with `axis` 1.
        group_sizes: [g] int32; rows beyond their sum give zeros.

    Returns:
        [m, n] float32.

    Raises:
        ValueError: the shapes do not fit.
        UnsupportedError: the named implementation refuses.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[axis] or group_sizes.shape != w.shape[:1]:
        raise ValueError(f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit")
    return select(facts, impl).impl.run(x, w, group_sizes, axis=axis)


def grouped_outer(a: Array, b: Array, group_sizes: Array, *, facts: Facts, impl: str = "auto") -> Array:
    """Sums the outer products of each group's rows: [m, n], [m, k] -> [g, n, k] float32.

    Raises:
        ValueError: the numbers of rows differ.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[0]:
        raise ValueError(f"a {a.shape} and b {b.shape} do not have the same rows")
    return choose(OUTER_IMPLS, facts, impl).impl.run(a, b, group_sizes)
