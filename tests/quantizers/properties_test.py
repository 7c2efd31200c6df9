"""Properties over drawn arrays: symmetry, powers of two, idempotence, independence of the batch."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

import fp4rl_jax

# numbers that bfloat16 holds, of 16 binades, with zeros: every shape alike, so nothing recompiles
ELEMENTS = st.builds(
    lambda m, e, s: s * m * 2.0**e, st.integers(0, 255), st.integers(-12, 4), st.sampled_from([1.0, -1.0])
)
ARRAYS = hnp.arrays(np.float32, (2, 64), elements=ELEMENTS.map(lambda v: float(np.float32(v))))
drawn = hypothesis.given(x=ARRAYS)
few = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
FORMATS = ["nvfp4", "mxfp4", "hif4", "fp8_e4m3"]


def value(x: np.ndarray, fmt: str, **options) -> np.ndarray:
    return np.asarray(fp4rl_jax.quantize(jnp.asarray(x), fmt, **options).dequantize())


@few
@drawn
def test_it_is_odd(x):
    for fmt in FORMATS:
        np.testing.assert_array_equal(value(-x, fmt), -value(x, fmt))


@few
@hypothesis.given(x=ARRAYS, k=st.integers(-20, 5))
def test_it_commutes_with_powers_of_two(x, k):
    for fmt in FORMATS:
        np.testing.assert_array_equal(value(np.ldexp(x, k), fmt), np.ldexp(value(x, fmt), k))


@few
@drawn
def test_values_on_the_grid_stay(x):
    """Codes of a re-quantized tensor, where no block scale was an E4M3 subnormal."""
    for fmt in ("nvfp4", "mxfp4"):
        q = fp4rl_jax.quantize(jnp.asarray(x), fmt)
        if fmt == "nvfp4" and (np.asarray(q.scales) < 8).any():
            continue
        np.testing.assert_array_equal(value(q.dequantize(), fmt), np.asarray(q.dequantize()))


@few
@drawn
def test_a_row_does_not_see_the_others(x):
    options = {"nvfp4": {"outer": "row"}}
    for fmt in FORMATS:
        alone = value(np.stack([x[0], x[0] * 0]), fmt, **options.get(fmt, {}))[0]
        np.testing.assert_array_equal(alone, value(x, fmt, **options.get(fmt, {}))[0])


@few
@drawn
def test_bfloat16_gives_the_codes_of_float32(x):
    for fmt in FORMATS:
        ours = fp4rl_jax.quantize(jnp.asarray(x), fmt)
        narrow = fp4rl_jax.quantize(jnp.asarray(x, jnp.bfloat16), fmt)
        np.testing.assert_array_equal(np.asarray(narrow.packed), np.asarray(ours.packed))
        np.testing.assert_array_equal(np.asarray(narrow.scales), np.asarray(ours.scales))
