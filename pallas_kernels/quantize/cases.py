"""Inputs and tasks that tests compare and benchmarks time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize.task import Outer, Task

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Rows to quantize."""

    m: int
    k: int
    dtype: str = "bfloat16"
    seed: int = 0

    def rows(self) -> Array:
        """Normal values over 24 binades; zeros of both signs, ties, a nan and infinities among them.

        Row 0 is 2^-60 times smaller, the last row 2^60 times larger; a block of row 1 (m > 1) is zero.
        """
        rng = np.random.default_rng((self.seed, self.m, self.k))
        shape = (self.m, self.k)
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 12, size=shape)
        x = np.where(rng.random(shape) < 0.3, rng.integers(-48, 49, size=shape) / 8, x)  # ties
        x[rng.random(shape) < 0.05] = 0.0
        x[rng.random(shape) < 0.02] = -0.0
        if self.m > 1:
            x[0] *= 2.0**-60
            x[-1] *= 2.0**60
            x[1, : min(80, self.k)] = 0.0
        if self.m > 2:
            for value, place in ((np.nan, 0.4), (np.inf, 0.6), (-np.inf, 0.6)):
                x[2, int(place * self.k)] = value
        return jnp.asarray(x, jnp.float32).astype(self.dtype)


#: Blocks that fill no chunk, a row of one block, more rows than threads take, several blocks of threads.
SMALL = tuple(
    Case(m=m, k=k, dtype=dtype)
    for dtype in ("bfloat16", "float32")
    for m, k in ((1, 64), (3, 576), (37, 192), (5, 1536), (2, 4160))
)

#: The inputs of the linears whose matmuls are timed.
WIDTHS = (4096, 8192, 12288, 28672)


def outer_of(fmt: str) -> Outer:
    """The outer scale of activations."""
    return "row" if fmt == "nvfp4" else "none"


def tasks(fmt: str) -> tuple[Task, ...]:
    """A format with each set of outputs that a caller asks for."""
    outer = outer_of(fmt)
    return (
        Task(fmt=fmt, outer=outer),
        Task(fmt=fmt, outer=outer, order="natural", codes=True),
        Task(fmt=fmt, outer=outer, compact=True),
        Task(fmt=fmt, outer=outer, residual="dense"),
        Task(fmt=fmt, outer=outer, residual="2:4", folded=False, codes=True, compact=True),
    )
