"""Operands and records that the benchmarks of the packed FP4 matmul share."""

import dataclasses
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import provenance

from pallas_kernels import formats
from pallas_kernels.packed_matmul.cases import SHAPES as SHAPES
from pallas_kernels.packed_matmul.config import Config

#: Next to nothing to read: what a call costs before it begins.
EMPTY = {"empty": (8448, 512)}
REFUSALS = (jax.errors.JaxRuntimeError, ValueError, NotImplementedError)


class Record:
    """The results, written after every entry."""

    def __init__(self, path: Path, budget: float):
        self.path, self.end = path, time.monotonic() + budget
        self.data = provenance.facts() | {"rows": []}

    def add(self, **row) -> None:
        """Prints a row and writes the file."""
        self.data["rows"].append(row)
        print(
            " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
            flush=True,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=0) + "\n")

    def over(self) -> bool:
        """Whether the budget is spent."""
        return time.monotonic() > self.end


def short(config: Config) -> str:
    default = Config()
    changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return ",".join(f"{k}={v}" for k, v in changed.items() if v != getattr(default, k) or k == "groups")


def random_weight(n: int, k: int, fmt: str, seed: int) -> tuple[jax.Array, jax.Array]:
    """Random codes and finite scale bytes, on the device."""
    f = formats.FORMATS[fmt]
    keys = jax.random.split(jax.random.key(seed), 2)
    codes = jax.random.bits(keys[0], (n, k), jnp.uint8) & 15
    scales = jax.random.bits(keys[1], (n, -(-k // f.BLOCK) * f.SCALE_WIDTH), jnp.uint8)
    limit = {"nvfp4": 0x7F, "mxfp4": 120, "hif4": 0xFF}[fmt]
    return codes, scales % limit + (64 if fmt == "mxfp4" else 0)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def packed_weight(n: int, k: int, fmt: str, seed) -> tuple[jax.Array, jax.Array]:
    """A random packed weight and its unit."""
    return formats.pack(*random_weight(n, k, fmt, seed), fmt)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_stream(n: int, k: int, fmt: str, seed) -> jax.Array:
    """A packed weight of random codes and random scales in the middle of their range, for timing."""
    f = formats.FORMATS[fmt]
    shape = (n // 64, k // f.BLOCK_K, f.CODE_ROWS + f.SCALE_ROWS, 128)
    words = jax.random.bits(jax.random.key(seed), shape, jnp.uint32)
    return words.at[:, :, f.CODE_ROWS :].set((words[:, :, f.CODE_ROWS :] & 0x7F7F7F7F) | 0x40404040)


def dense(codes: np.ndarray, scales: np.ndarray, fmt: str) -> np.ndarray:
    """float64 weights from codes and scale bytes, by the written meaning of each format (numpy only)."""
    code = codes.astype(np.int64)
    sign, magnitude = np.where(code & 8, -1.0, 1.0), code & 7
    byte = scales.astype(np.int64)
    if fmt == "hif4":
        block = byte.reshape(len(byte), -1, 4)
        group = np.arange(16)
        fine = ((block[..., 1:2] >> (group // 2)) & 1) + (
            ((block[..., 2:3] | (block[..., 3:4] << 8)) >> group) & 1
        )
        one = 2.0 ** ((block[..., :1] >> 2) - 48) * (1 + (block[..., :1] & 3) / 4)
        scale = np.repeat((one * 2.0**fine).reshape(len(byte), -1), 4, axis=1)
        return sign * magnitude / 4 * scale[:, : codes.shape[1]]
    value = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[magnitude]
    if fmt == "mxfp4":
        scale = 2.0 ** (byte - 127)
    else:
        exponent, fraction = byte >> 3, byte & 7
        scale = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + fraction / 8), 2.0**-6 * fraction / 8)
    return sign * value * np.repeat(scale, 16 if fmt == "nvfp4" else 32, axis=1)[:, : codes.shape[1]]
