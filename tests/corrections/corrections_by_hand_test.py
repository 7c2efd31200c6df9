"""The four corrections on the same five tokens, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax.corrections import icepop, none, sequence_mask, tis

RATIO = np.array([[0.4, 0.5, 1.0, 2.0, 5.5], [1.0, 1.0, 1.0, 1.0, 9.0]], np.float32)
MASK = jnp.array([[True] * 5, [True] * 4 + [False]])
LOG_RATIO = jnp.log(RATIO)


def test_none_weighs_every_token_one():
    np.testing.assert_array_equal(none.weights(LOG_RATIO, MASK, none.Config()), np.asarray(MASK, np.float32))


def test_tis_caps_from_above_only():
    found = tis.weights(LOG_RATIO, MASK, tis.Config())
    np.testing.assert_allclose(found, [[0.4, 0.5, 1.0, 2.0, 2.0], [1, 1, 1, 1, 0]], rtol=1e-6)
    clipped = tis.clipped(LOG_RATIO, MASK, tis.Config(cap=1.5))
    np.testing.assert_array_equal(clipped, [[False, False, False, True, True], [False] * 5])


def test_icepop_drops_both_tails():
    found = icepop.weights(LOG_RATIO, MASK, icepop.Config(low=0.45))
    np.testing.assert_allclose(found, [[0.0, 0.5, 1.0, 2.0, 0.0], [1, 1, 1, 1, 0]], rtol=1e-6)
    assert icepop.Config() == icepop.Config(low=0.5, high=5.0)


def test_sequence_mask_looks_at_the_geometric_mean():
    # rows: 2 * 1/2 = 1 kept; 1.003 per token dropped; 1.0015 kept; 0.998 dropped; empty kept at 0
    ratio = jnp.array([[2.0, 0.5], [1.003, 1.003], [1.003, 1.0], [0.998, 0.998], [7.0, 7.0]])
    mask = jnp.array([[True, True]] * 4 + [[False, False]])
    found = sequence_mask.weights(jnp.log(ratio), mask, sequence_mask.Config())
    np.testing.assert_allclose(found, [[2.0, 0.5], [0, 0], [1.003, 1.0], [0, 0], [0, 0]], rtol=1e-6)
    pure = sequence_mask.weights(jnp.log(ratio), mask, sequence_mask.Config(token_weight="one"))
    np.testing.assert_array_equal(pure, [[1, 1], [0, 0], [1, 1], [0, 0], [0, 0]])
    clipped = sequence_mask.clipped(jnp.log(ratio), mask, sequence_mask.Config())
    np.testing.assert_array_equal(clipped[:, 0], [False, True, False, True, False])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: tis.Config(cap=0.5), "cap is 0.5"),
        (lambda: icepop.Config(low=2.0, high=1.0), r"band is \[2.0, 1.0\]"),
        (lambda: sequence_mask.Config(low=-1.0), r"band is \[-1.0"),
        (lambda: sequence_mask.Config(token_weight="ratios"), "did you mean 'ratio'"),  # type: ignore
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
