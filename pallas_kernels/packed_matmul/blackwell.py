"""The Blackwell kernel as two implementations: operands in its layouts, rows and columns in whole tiles.

`sm100` multiplies codes as they are, `sm100_decoded` bfloat16 activations by decoded weights. Either makes
the weight's operand from the packed stream in every call, which no GPU has timed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Facts
from pallas_kernels.formats import FORMATS, decode, unpacked_shape
from pallas_kernels.packed_matmul import sm100
from pallas_kernels.packed_matmul.block_scaled import (
    DECODED_OVER_CODED,
    SCALE_DTYPES,
    Coded,
    as_float4,
    to_blackwell,
)
from pallas_kernels.packed_matmul.sm100 import Config, impossible

Array = jax.Array


def matmul(
    x: Array | Coded,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    residual: Array | Coded | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    order: str = "free",
    interpret: Any = None,
) -> Array:
    """`reference.matmul` on `sm100.matmul`: block-scaled where x is `Coded`, else decoded.

    Args: as of `reference.matmul`; `interpret` as of `sm100.matmul`.
    """
    del order
    m = x.shape[0]
    n, k = unpacked_shape(packed, fmt)
    coded = isinstance(x, Coded)
    residual_k = 0 if residual is None else residual.shape[1]
    sums = 2 if _outer(x) is not None or _outer(residual) is not None else 1
    config = config_for(m, n, k, fmt=fmt, coded=coded, residual_k=residual_k, sums=sums)
    assert config is not None, "refuses() answers first"
    tokens = functools.partial(_tokens, fmt=fmt, config=config, m=whole(m, config.tile_m))
    w = _weight(packed, fmt, config, whole(n, sm100.ROWS * config.blocks), whole(k, config.tile_k))
    if coded:
        scale = scale * jnp.float32(DECODED_OVER_CODED[fmt])
    out = sm100.matmul(
        w,
        tokens(x, k=whole(k, config.tile_k)),
        _row_scale(x, row_scale, whole(m, config.tile_m)),
        scale,
        fmt=fmt,
        config=config,
        residual=None if residual is None else tokens(residual, k=whole(residual_k, config.tile_k)),
        residual_scale=None if sums == 1 else _row_scale(residual, row_scale, whole(m, config.tile_m)),
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return out[:m, :n]


def whole(size: int, tile: int) -> int:
    """The least multiple of `tile` that is no less than `size`."""
    return -(-size // tile) * tile


def config_for(
    m: int, n: int, k: int, *, fmt: str, coded: bool, residual_k: int = 0, sums: int = 1
) -> Config | None:
    """A config of a call, or None where none is possible: a rule, for no GPU has measured any.

    Up to 128 tokens a block takes them all, beyond that pairs of blocks share tiles of 256 or 128.
    """
    mma, steps = ("block_scaled", (256,)) if coded else ("dense", (128, 64))
    few = [(1, tile) for tile in (8, 16, 32, 64, 128) if tile >= m]
    for blocks, tile_m in (*(few or [(2, 256), (2, 128)]), (1, 128), (1, 64)):
        for tile_k in steps:
            for stages in (6, 4, 3, 2):
                config = Config(mma=mma, blocks=blocks, tile_m=tile_m, tile_k=tile_k, stages=stages)
                sizes = dict(m=whole(m, tile_m), n=whole(n, sm100.ROWS * blocks), k=whole(k, tile_k))
                sizes |= dict(residual_k=whole(residual_k, tile_k), sums=sums)
                if impossible(config, fmt, **sizes, out_bytes=4) is None:
                    return config
    return None


def _outer(x: Array | Coded | None) -> Array | None:
    return x.outer if isinstance(x, Coded) else None


def _row_scale(x: Array | Coded | None, row_scale: Array, m: int) -> Array:
    outer = _outer(x)
    both = row_scale if outer is None else row_scale * outer
    return jnp.pad(both, (0, m - both.shape[0]))


def _filled(x: Array, *sizes: int) -> Array:
    """x with zeros up to `sizes` on its first axes."""
    missing = [size - had for size, had in zip(sizes, x.shape, strict=False)]
    return jnp.pad(x, [(0, count) for count in missing] + [(0, 0)] * (x.ndim - len(sizes)))


def _weight(packed: Array, fmt: str, config: Config, n: int, k: int) -> tuple[Array, ...]:
    if config.mma == "dense":
        return (_filled(jax.lax.optimization_barrier(decode(packed, fmt)), n, k),)
    codes, scales = to_blackwell(packed, fmt)
    scales = _filled(scales, n // sm100.ROWS, k // FORMATS[fmt].BLOCK // 4)
    return _operand(_filled(codes, n, k // 2), scales, fmt)


def _tokens(x: Array | Coded, *, fmt: str, config: Config, m: int, k: int) -> tuple[Array, ...]:
    if not isinstance(x, Coded):
        return (_filled(x, m, k),)
    scales = sm100.token_scales(_filled(x.scales, m, k // FORMATS[fmt].BLOCK), config)
    return _operand(_filled(x.codes, m, k // 2), scales, fmt)


def _operand(codes: Array, scales: Array, fmt: str) -> tuple[Array, ...]:
    return as_float4(codes), jax.lax.bitcast_convert_type(scales, SCALE_DTYPES[fmt])


def refuses_codes(facts: Facts) -> str | None:
    """Why codes cannot be multiplied as they are: another GPU, formats or shapes."""
    if facts.w_dtype not in SCALE_DTYPES:
        return f"needs a packed weight in {tuple(SCALE_DTYPES)}, got {facts.w_dtype}"
    if facts.x_dtype != facts.w_dtype:
        return f"needs activations as codes of the weight's format {facts.w_dtype}, got {facts.x_dtype}"
    return _refuses(facts, coded=True)


def refuses_decoded(facts: Facts) -> str | None:
    """Why decoded weights cannot be multiplied: another GPU, formats or shapes."""
    if facts.w_dtype not in FORMATS:
        return f"needs a packed weight in {tuple(FORMATS)}, got {facts.w_dtype}"
    if facts.x_dtype != "bfloat16":
        return f"needs bfloat16 activations, got {facts.x_dtype}"
    return _refuses(facts, coded=False)


def _refuses(facts: Facts, *, coded: bool) -> str | None:
    if facts.platform != "gpu" or facts.capability != (10, 0):
        return f"needs a GPU of compute capability 10.0, got {facts.platform} {facts.capability}"
    if facts.order != "free":
        return f"its rows were not compared between numbers of rows; order is {facts.order!r}"
    n, k, block = facts.n, facts.k, FORMATS[facts.w_dtype].BLOCK_K
    if n % 64 or k % block:
        return f"needs n a multiple of 64 and k of {block}, got n={n}, k={k}"
    sums = 2 if coded else 1
    if facts.m and config_for(facts.m, n, k, fmt=facts.w_dtype, coded=coded, residual_k=k, sums=sums) is None:
        return f"no config fits m={facts.m}, n={n}, k={k}"
    return None
