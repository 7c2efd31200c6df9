"""Exactness of the packed FP4 matmul on a GPU; `kernels.py check` runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernels_operands import REFUSALS, Record, dense, packed_weight, random_weight, short

from pallas_kernels import formats
from pallas_kernels.packed_matmul import sm90
from pallas_kernels.packed_matmul.config import Config, impossible, padded_m


def check_configs() -> list[Config]:
    """One config for every path of the kernel."""
    return [
        Config(groups=1, tile_m=8),
        Config(groups=2, tile_m=16, stages=3),
        Config(groups=3, tile_m=8, stages=5),
        Config(groups=4, tile_m=8, splits=2, stages=3),
        Config(groups=6, tile_m=8, splits=2, stages=2),
        Config(groups=2, tile_m=16, splits=4),
        Config(groups=2, tile_m=32, share=2),
        Config(groups=2, tile_m=64, splits=2, share=2, stages=3),
        Config(groups=2, tile_m=64, segments=2, stages=3),
        Config(groups=2, tile_m=64, stages=2),
        Config(groups=2, tile_m=128, stages=2, early=False),
        Config(groups=2, tile_m=256, tile_k=128, stages=2),
    ]


def _operands(fmt: str, n: int, k: int):
    codes, scales = random_weight(n, k, fmt, 7)
    packed, unit = jax.jit(formats.pack, static_argnums=2)(codes, scales, fmt)
    w = dense(np.asarray(codes), np.asarray(scales), fmt)
    return packed, unit, w


def check(record: Record, args) -> None:
    """One-hot rows bit for bit, random rows against float64, the residual, NaN, and the fixed order."""
    n, k = 768, 2048
    for fmt in formats.FORMATS if args.fmt == "all" else [args.fmt]:
        packed, unit, w = _operands(fmt, n, k)
        for config in check_configs():
            if record.over():
                return
            row = dict(part="check", fmt=fmt, config=short(config))
            print("check", fmt, row["config"], flush=True)  # a kernel that hangs is named
            try:
                record.add(**row, **check_one(packed, unit, w, fmt, config))
            except REFUSALS as error:
                record.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")
    if args.fmt in ("all", "nvfp4"):
        check_order(record)


def check_one(packed, unit, w, fmt: str, config: Config) -> dict:
    """Exactness figures of one config; every `_ok` must be True."""
    n, k = w.shape
    m = max(config.tile_m, 64)
    m = padded_m(m, config)
    ones, scale = jnp.ones(m, jnp.float32), unit.reshape(1)
    reason = impossible(config, fmt, m=m, n=n, k=k, out_bytes=4)
    if reason:
        return dict(skipped=reason)
    run = jax.jit(functools.partial(sm90.matmul, fmt=fmt, config=config, out_dtype=jnp.float32))
    order = jax.jit(functools.partial(formats.order_k, fmt=fmt))
    hot_ok = True
    for low in range(0, k, m):
        x = np.zeros((m, k), np.float32)
        columns = np.arange(low, min(low + m, k))
        x[np.arange(len(columns)), columns] = 1
        out = np.asarray(run(order(jnp.asarray(x, jnp.bfloat16)), packed, ones, scale), np.float64)
        hot_ok &= bool(np.array_equal(out[: len(columns)], w[:, columns].T))
    rng = np.random.default_rng(1)
    x, r = (jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16) for _ in range(2))
    row = jnp.asarray(2.0 ** rng.integers(-3, 4, m), jnp.float32)
    x64, r64, row64 = (np.asarray(a, np.float64) for a in (x, r, row))
    found = dict(hot_ok=hot_ok)
    exact, size = (x64 @ w.T) * row64[:, None], (abs(x64) @ abs(w).T) * row64[:, None]
    out = np.asarray(run(order(x), packed, row, scale), np.float64)
    found |= dict(random_units=float((abs(out - exact) / (size * 2.0**-24)).max()), k_units=2 * k + 2)
    half = order(r)[:, : k // 2]
    if impossible(config, fmt, m=m, n=n, k=k, residual_k=k // 2, out_bytes=4) is None:
        both = jax.jit(functools.partial(sm90.matmul, fmt=fmt, config=config, out_dtype=jnp.float32))
        out = np.asarray(both(order(x), packed, row, scale, residual=half), np.float64)
        w_ordered = np.asarray(order(jnp.asarray(w, jnp.float32)), np.float64)[:, : k // 2]
        second, size2 = (
            np.asarray(half, np.float64) @ w_ordered.T,
            abs(np.asarray(half, np.float64)) @ abs(w_ordered).T,
        )
        error = abs(out - exact - second * row64[:, None]) / ((size + size2 * row64[:, None]) * 2.0**-24)
        found |= dict(residual_units=float(error.max()))
    poisoned = order(x.at[3, 5].set(jnp.nan))
    out = np.asarray(run(poisoned, packed, row, scale))
    return found | dict(nan_ok=bool(np.isnan(out[3]).all() and not np.isnan(np.delete(out, 3, 0)).any()))


def check_order(record: Record) -> None:
    """Rows of one input, for many m and tilings under one tree of sums, bit for bit."""
    n, k, parts = 512, 4096, 4
    packed, unit = packed_weight(n, k, "nvfp4", 3)
    rng = np.random.default_rng(2)
    x = formats.order_k(jnp.asarray(rng.standard_normal((4096, k)), jnp.bfloat16), "nvfp4")
    expected = None
    for m, config in (
        (8, Config(groups=2, tile_m=8, splits=parts)),
        (8, Config(groups=4, tile_m=8, splits=parts)),
        (16, Config(groups=1, tile_m=16, splits=parts)),
        (24, Config(groups=2, tile_m=24, splits=parts)),
        (64, Config(groups=2, tile_m=64, splits=parts, tile_k=128, stages=3)),
        (64, Config(groups=2, tile_m=64, segments=parts, tile_k=128)),
        (128, Config(groups=2, tile_m=128, segments=parts, tile_k=128)),
        (4096, Config(groups=2, tile_m=128, segments=parts, tile_k=128, share=2)),
        (4096, Config(groups=1, tile_m=128, segments=parts, tile_k=128)),
    ):
        if record.over():
            return
        row = dict(part="order", m=m, config=short(config))
        try:
            run = functools.partial(sm90.matmul, fmt="nvfp4", config=config, out_dtype=jnp.float32)
            out = np.asarray(jax.jit(run)(x[:m], packed, jnp.ones(m, jnp.float32), unit.reshape(1)))
        except REFUSALS as error:
            record.add(**row, error=f"{type(error).__name__}: {str(error)[:300]}")
            continue
        expected = out[:8] if expected is None else expected
        record.add(**row, same_bits=bool(np.array_equal(out[:8], expected)))
