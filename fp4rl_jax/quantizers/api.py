"""`quantize` and `fake_quantize`: the public functions, by format name and options."""

from fp4rl_jax.arrays import Array
from fp4rl_jax.formats import Format, make
from fp4rl_jax.qtensor import QTensor
from fp4rl_jax.quantizers._encode import AxisName
from fp4rl_jax.quantizers.quantizer import Quantizer, Ste
from fp4rl_jax.quantizers.rounding import Hint, Nearest, Rounding


def quantize(
    x: Array,
    fmt: str | Format,
    *,
    axis: int = -1,
    rounding: Rounding = Nearest(),  # noqa: B008 (frozen, equal by value)
    key: Array | None = None,
    hint: Hint | None = None,
    outer_scale: Array | None = None,
    axis_name: AxisName = None,
    **options: object,
) -> QTensor:
    """Rounds `x` to a format's grid, block by block along one axis.

    Args:
        x: [...] float32 or bfloat16, any rank above 0. A ragged last block is padded with zeros,
            which the QTensor stores and `dequantize` drops.
        fmt: a format's name ("nvfp4", "mxfp4", "hif4", "fp8_e4m3") or a Format object.
        axis: the quantized axis, the one that a matmul contracts.
        rounding: Nearest(), Stochastic() (needs `key`) or Guided() (needs `hint`).
        key: PRNG key, an array leaf; used by Stochastic only.
        hint: a rollout's QTensor or `compact` of it; used by Guided only, whose scales it gives.
        outer_scale: float32, required with `outer="static"` and refused otherwise; a scalar or of
            x's rank. This is how arrays share one scale (q/k/v, gate/up, a KV cache).
        axis_name: under shard_map, the mesh axes over which the span of the outer scale is split:
            all that shard x for `outer="tensor"`, those that shard `axis` for one scale a row.
        **options: the format's own fields, e.g. `outer="row"`, `scale_rule="even"`.

    Returns:
        QTensor of x's shape.

    Raises:
        ValueError: unknown format, option, option value or axis (naming the nearest); a missing
            or refused `outer_scale`; a shard that would cut a block.
        TypeError: x is neither float32 nor bfloat16.

    Exact: jit, eager, CPU and GPU give the same bytes; float32 and bfloat16 inputs of equal value
    give the same codes; a shard gives the bytes of the whole.
    Error: at most half a grid step inside the block's range. A non-finite value poisons its block:
    scale byte 0x7F, 255 or 0xFF (FP8: the outer scale is nan), codes 0, `QTensor.finite` False.
    """
    quantizer = Quantizer(make(fmt, **options), rounding)
    return quantizer.quantize(x, axis=axis, key=key, hint=hint, outer_scale=outer_scale, axis_name=axis_name)


def fake_quantize(
    x: Array,
    fmt: str | Format,
    *,
    axis: int = -1,
    rounding: Rounding = Nearest(),  # noqa: B008 (frozen, equal by value)
    ste: Ste = "identity",
    key: Array | None = None,
    hint: Hint | None = None,
    outer_scale: Array | None = None,
    axis_name: AxisName = None,
    **options: object,
) -> Array:
    """`dequantize(quantize(x))` in x's dtype, with a straight-through gradient.

    Args:
        x, fmt, axis, rounding, key, hint, outer_scale, axis_name, **options: as in `quantize`.
        ste: "identity" passes the gradient on; "clipped" zeroes it where |x / scale| > qmax.

    Returns:
        Array of x's shape and dtype. Key, hint and outer scale get zero gradients.

    Exact: the values of `dequantize(quantize(x), x.dtype)`, bit for bit.
    """
    quantizer = Quantizer(make(fmt, **options), rounding, ste)
    return quantizer.fake_quantize(
        x, axis=axis, key=key, hint=hint, outer_scale=outer_scale, axis_name=axis_name
    )
