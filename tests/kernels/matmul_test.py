"""Every implementation of the matmuls against its reference, on shared cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, matmul
from pallas_kernels.dispatch import Facts
from pallas_kernels.matmul import cases, reference
from pallas_kernels.testing import Case, accumulation_bound, assert_matches_reference

PLATFORM = jax.devices()[0].platform


def facts(case: Case, order: str = "free") -> Facts:
    return Facts(
        platform=PLATFORM,
        m=case.m,
        n=case.n,
        k=case.k,
        x_dtype=case.dtype,
        w_dtype=case.dtype,
        order=order,
    )


def runs_here(impl: matmul.Impl, case: Case) -> bool:
    return any(impl.refuses(facts(case, order)) is None for order in ("free", "fixed"))


@pytest.mark.parametrize("dims", [(1, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("impl", [i for i in matmul.IMPLS if i.name != "reference"], ids=lambda i: i.name)
def test_matmul(impl: matmul.Impl, dims: tuple[int, int]) -> None:
    able = [case for case in cases.SMALL if runs_here(impl, case)]
    if not able:
        pytest.skip(f"{impl.name}: {impl.refuses(facts(cases.SMALL[0]))}")
    for case in able:
        assert_matches_reference(impl.run, reference.matmul, case, dims=dims)


def test_the_comparison_fails_on_a_wrong_product() -> None:
    def wrong(x, w, *, dims):
        return reference.matmul(x, w, dims=dims) * (1 + 2.0**-10)

    with pytest.raises(AssertionError, match="over the bound"):
        assert_matches_reference(wrong, reference.matmul, cases.SMALL[2])


def test_operands_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"cannot contract axis 1 of \(2, 3\) with axis 1 of \(4, 5\)"):
        matmul.matmul(jnp.ones((2, 3)), jnp.ones((4, 5)), facts=facts(cases.SMALL[0]))


SIZES = ((3, 0, 7), (0, 0, 0), (10, 0, 0), (2, 3, 1))


@pytest.mark.parametrize("name", ["xla", "rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_matmul(name: str, dtype: str, rng: np.random.Generator) -> None:
    run = {i.name: i.run for i in grouped_matmul.IMPLS}[name]
    x = jnp.asarray(rng.normal(size=(10, 24)), dtype)
    w = jnp.asarray(rng.normal(size=(3, 20, 24)), dtype)
    bound = np.stack([accumulation_bound(x, part) for part in w]).max(axis=0)
    jitted = jax.jit(run)
    for sizes in SIZES:
        got = np.asarray(jitted(x, w, jnp.asarray(sizes, jnp.int32)), np.float64)
        expected = grouped_matmul.reference.grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32))
        assert np.all(np.abs(got - np.asarray(expected, np.float64)) <= bound), sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_outer_and_the_other_axis(dtype: str, rng: np.random.Generator) -> None:
    a = jnp.asarray(rng.normal(size=(10, 20)), dtype)
    b = jnp.asarray(rng.normal(size=(10, 24)), dtype)
    w = jnp.asarray(rng.normal(size=(3, 20, 24)), dtype)
    for sizes in SIZES:
        groups = jnp.asarray(sizes, jnp.int32)
        got = grouped_matmul.xla.grouped_outer(a, b, groups)
        expected = grouped_matmul.reference.grouped_outer(a, b, groups)
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=0, atol=1e-4)
        got = grouped_matmul.xla.grouped_matmul(a, w, groups, axis=1)
        expected = grouped_matmul.reference.grouped_matmul(a, w, groups, axis=1)
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=0, atol=1e-4)
