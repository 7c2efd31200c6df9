"""The Hopper kernel as an implementation: config from the tuning table, rows padded to whole tiles."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Facts
from pallas_kernels.formats import FORMATS, unpacked_shape
from pallas_kernels.packed_matmul import sm90
from pallas_kernels.packed_matmul.config import Config, padded_m
from pallas_kernels.packed_matmul.tuning import config_for, fixed_config_for

Array = jax.Array


def matmul(
    x: Array,
    packed: Array,
    row_scale: Array,
    scale: Array,
    *,
    fmt: str,
    residual: Array | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
    order: str = "free",
) -> Array:
    """`reference.matmul` on `sm90.matmul`; the padding of rows fuses into what makes x."""
    m, k = x.shape
    n, _ = unpacked_shape(packed, fmt)
    residual_k = 0 if residual is None else residual.shape[1]
    config = _config(m, n, k, fmt, residual_k, order)
    assert config is not None, "refuses() answers first"
    missing = padded_m(m, config) - m
    x, row_scale = jnp.pad(x, ((0, missing), (0, 0))), jnp.pad(row_scale, (0, missing))
    if residual is not None:
        whole = -(-residual_k // config.tile_k) * config.tile_k - residual_k
        residual = jnp.pad(residual, ((0, missing), (0, whole)))
    out = sm90.matmul(
        x, packed, row_scale, scale, fmt=fmt, config=config, residual=residual, out_dtype=out_dtype
    )
    return out[:m]


def _config(m: int, n: int, k: int, fmt: str, residual_k: int, order: str) -> Config | None:
    choose = config_for if order == "free" else fixed_config_for
    return choose(m, n, k, fmt=fmt, residual_k=-(-residual_k // 512) * 512 if residual_k else 0, out_bytes=4)


def refuses(facts: Facts) -> str | None:
    """A Hopper GPU, a packed format, bfloat16 activations, and a config that fits."""
    if facts.platform != "gpu" or facts.capability != (9, 0):
        return f"needs a GPU of compute capability 9.0, got {facts.platform} {facts.capability}"
    if facts.w_dtype not in FORMATS:
        return f"needs a packed weight in {tuple(FORMATS)}, got {facts.w_dtype}"
    if facts.x_dtype != "bfloat16":
        return f"needs bfloat16 activations, got {facts.x_dtype}"
    block = FORMATS[facts.w_dtype].BLOCK_K
    if facts.n % 64 or facts.k % block:
        return f"needs n a multiple of 64 and k of {block}, got n={facts.n}, k={facts.k}"
    if facts.m and _config(facts.m, facts.n, facts.k, facts.w_dtype, facts.k, facts.order) is None:
        return f"no config fits m={facts.m}, n={facts.n}, k={facts.k}"
    return None
