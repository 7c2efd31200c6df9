"""Cases and bounds for comparing an implementation with its reference."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

#: Half an ulp of the float32 accumulator, relative.
UNIT = 2.0**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One matmul to compare: x [m, k] times w [n, k] in one dtype."""

    m: int
    n: int
    k: int
    dtype: str = "float32"
    seed: int = 0

    def operands(self) -> tuple[Array, Array]:
        """Normal operands of the case, the same in every run; magnitudes span four binades."""
        rng = np.random.default_rng((self.seed, self.m, self.n, self.k))
        x, w = (
            rng.normal(size=(rows, self.k)) * 2.0 ** rng.integers(-2, 3, size=(rows, 1))
            for rows in (self.m, self.n)
        )
        return jnp.asarray(x, self.dtype), jnp.asarray(w, self.dtype)


def accumulation_bound(
    x: Array | np.ndarray, w: Array | np.ndarray, *, dims: tuple[int, int] = (1, 1)
) -> np.ndarray:
    """The largest distance of two float32 sums of the same exact products, in any order.

    Each is within k units of the exact sum, relative to the sum of magnitudes (Higham 2002, 4.2);
    a float32 product adds one unit more.
    """
    a, b = (np.abs(np.asarray(v, np.float64)) for v in (x, w))
    a = a if dims[0] == 1 else a.T
    b = b.T if dims[1] == 1 else b
    return 2 * (a.shape[1] + 1) * UNIT * (a @ b)


def assert_matches_reference(
    run: Callable[..., Array], reference: Callable[..., Array], case: Case, *, dims: tuple[int, int] = (1, 1)
) -> None:
    """Asserts that `run` equals `reference` on a case within `accumulation_bound`.

    Raises:
        AssertionError: with the place and size of the worst excess.
    """
    x, w = case.operands()
    x, w = (x if dims[0] == 1 else x.T), (w if dims[1] == 1 else w.T)
    got, expected = (
        np.asarray(jax.jit(f, static_argnames="dims")(x, w, dims=dims)) for f in (run, reference)
    )
    assert got.dtype == expected.dtype == np.float32, (got.dtype, expected.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    excess = np.abs(got.astype(np.float64) - expected) - accumulation_bound(x, w, dims=dims)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] <= 0, f"{case}: {got[worst]} for {expected[worst]} at {worst}, over the bound"
