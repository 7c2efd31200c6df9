"""Matrix product of activations with packed FP4 weights, outer scales after the accumulation.

`packed_matmul` validates, chooses and calls; `reference.py` is its meaning; `IMPLS` is the written
order. See `pallas_kernels.formats` for the packing.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Choice, Facts, Impl, choose
from pallas_kernels.formats import FORMATS, padded_k, unpacked_shape
from pallas_kernels.matmul import CPU, H200
from pallas_kernels.packed_matmul import blackwell, hopper, reference, xla
from pallas_kernels.packed_matmul.block_scaled import Coded, check_coded

Array = jax.Array


def _not_compared(facts: Facts) -> str | None:
    """The fixed order of the kernel as it is: three of nine comparisons were made, up to 16 rows."""
    if facts.order == "fixed":
        return "the fixed order's rows were compared on a GPU up to m=16 only"
    return None


#: The written order of `impl="auto"`; the reference is last and never refuses.
IMPLS = (
    Impl(
        name="sm90",
        run=hopper.matmul,
        refuses=hopper.refuses,
        verified_on=(H200,),
        unverified=_not_compared,
    ),
    Impl(name="sm100", run=blackwell.matmul, refuses=blackwell.refuses_codes, native=True, verified_on=()),
    Impl(name="sm100_decoded", run=blackwell.matmul, refuses=blackwell.refuses_decoded, verified_on=()),
    Impl(name="xla", run=xla.matmul, refuses=xla.refuses, verified_on=(CPU,)),
    Impl(name="reference", run=reference.matmul, refuses=lambda _: None, verified_on=(CPU,)),
)


def select(facts: Facts, impl: str = "auto") -> Choice:
    """The implementation that `packed_matmul` takes for these facts; see `dispatch.choose`."""
    return choose(IMPLS, facts, impl)


def packed_matmul(
    x: Array | Coded,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    facts: Facts,
    residual: Array | Coded | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    impl: str = "auto",
) -> Array:
    """(x @ w.T + residual @ w[:, :k'].T) * row_scale * scale, sums in float32.

    Args:
        x: [m, k] bfloat16, columns ordered as the weight's (`formats.order_k`), or `Coded` [m, k0] in the
            natural order, k0 filled up to k; its outer scales come on top of `row_scale`.
        packed: uint32 [n / 64, k / BLOCK_K, rows, 128], see `formats.pack`.
        row_scale: [m] float32, the activations' outer scales.
        scale: [1] float32, the weight's outer scale times its `unit`.
        fmt: the weight's format, a name of `formats.FORMATS`.
        facts: of this call; `w_dtype` is the format's name and `block_size` its block, `x_dtype` the
            format's name, too, where x is `Coded`.
        residual: [m, k'] of x's kind or None, a second term of the activations on their first k' columns
            and under the same row scale.
        out_dtype: float32 or bfloat16.
        impl: "auto" or a name of `IMPLS`.

    Returns:
        [m, n] out_dtype.

    Raises:
        ValueError: shapes, dtypes or the format do not fit each other.
        UnsupportedError: the named implementation refuses these facts.
    """
    if fmt not in FORMATS:
        raise ValueError(f"unknown packed format {fmt!r} (known: {', '.join(FORMATS)})")
    _, k = unpacked_shape(packed, fmt)
    _check_activations(x, k, fmt, facts)
    if row_scale.shape != (x.shape[0],) or scale.shape != (1,):
        raise ValueError(f"scales are [{x.shape[0]}] and [1], got {row_scale.shape} and {scale.shape}")
    if residual is not None:
        if isinstance(residual, Coded) != isinstance(x, Coded):
            raise ValueError(f"x and the residual are both codes or neither, got {type(x)}, {type(residual)}")
        if residual.shape[0] != x.shape[0] or residual.shape[1] > k:
            raise ValueError(f"the residual is [{x.shape[0]}, at most {k}], got {residual.shape}")
        if isinstance(residual, Coded):
            check_coded(residual, fmt)
    run = select(facts, impl).impl.run
    return run(
        x, packed, row_scale, scale, fmt=fmt, residual=residual, out_dtype=out_dtype, order=facts.order
    )


def _check_activations(x: Array | Coded, k: int, fmt: str, facts: Facts) -> None:
    if isinstance(x, Coded):
        check_coded(x, fmt)
        if padded_k(x.shape[1], fmt) != k or facts.x_dtype != fmt:
            raise ValueError(
                f"codes fill up to [m, {k}] with facts.x_dtype {fmt!r}; got {x.shape} and {facts.x_dtype!r}"
            )
    elif x.ndim != 2 or x.shape[1] != k or x.dtype != jnp.bfloat16:
        raise ValueError(f"x is bfloat16 [m, {k}], columns ordered and padded; got {x.dtype} {x.shape}")
