"""Decoding of magnitude grids, uniform or not."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.formats import E2M1, Grid


@pytest.mark.parametrize(
    "grid",
    [
        E2M1,
        Grid(values=(0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75), ties="away"),
        Grid(values=(0.0, 0.0625, 0.5, 0.6875, 3.0, 100.0)),  # steps that are no multiples of each other
        Grid(values=(0.0, 448.0)),
    ],
)
def test_a_code_decodes_to_its_value(grid: Grid) -> None:
    decoded = grid.decode(jnp.arange(len(grid.values)))
    assert decoded.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(grid.values, np.float32))
