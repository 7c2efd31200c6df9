"""`Format.nearest_values` gives the bits of `inner(encode(x))`, whatever the bfloat16 values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, plugins
from fp4rl_jax.quantizers import Quantizer


def options(fmt: formats.Format) -> list[formats.Format]:
    """The format and it with each of its choices changed alone, where it has a ladder."""
    fields = [f for f in dataclasses.fields(fmt) if f.metadata.get("choices")]
    made = [dataclasses.replace(fmt, **{f.name: choice}) for f in fields for choice in f.metadata["choices"]]
    return list(dict.fromkeys(found for found in made if found.has_ladder))


LADDERS = [
    pytest.param(fmt, id=repr(fmt)) for name in plugins.names(formats) for fmt in options(formats.make(name))
]


def patterns() -> np.ndarray:
    """uint16 [rows, 128]: every pattern among its neighbours, then mixed ones and narrow ranges."""
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 128)
    mixed = rng.integers(0, 1 << 16, (64, 128), dtype=np.uint16)
    finite = np.where((mixed & 0x7F80) == 0x7F80, mixed & 0x807F, mixed)
    subnormal = mixed & 0x81FF
    close = 0x3F00 + (mixed & 0x01FF) + (mixed & 0x8000)
    return np.concatenate([every, mixed, finite, subnormal, close])


@pytest.mark.fast_cases("MXFP4(scale_rule='floor')", str(formats.make("nvfp4")))
@pytest.mark.parametrize("fmt", LADDERS)
def test_values_are_those_of_the_codes(fmt: formats.Format) -> None:
    x = jax.lax.bitcast_convert_type(jnp.asarray(patterns()), jnp.bfloat16)
    quantizer = Quantizer(fmt)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        q = quantizer.quantize(x)
        return quantizer.inner(x, dtype=jnp.bfloat16)[0], q.inner(jnp.bfloat16)

    values, expected = (np.asarray(v).view(np.uint16) for v in both(x))
    np.testing.assert_array_equal(values, expected)


def test_wider_values_are_the_same() -> None:
    x = jax.lax.bitcast_convert_type(jnp.asarray(patterns()), jnp.bfloat16)
    for fmt in formats.make("nvfp4", outer="row"), formats.make("mxfp4"):
        narrow, wide = (Quantizer(fmt).inner(x, dtype=dtype)[0] for dtype in (jnp.bfloat16, jnp.float32))
        bits = np.asarray(narrow).view(np.uint16).astype(np.uint32) << 16
        np.testing.assert_array_equal(np.asarray(wide).view(np.uint32), bits)


def test_the_programs_of_a_cpu_take_it() -> None:
    """Comparisons of 16-bit integers are there where there is a ladder, and not for float32 input."""

    def program(fmt: formats.Format, dtype: type) -> str:
        x = jax.ShapeDtypeStruct((4, 64), dtype)
        return jax.jit(lambda x: Quantizer(fmt).inner(x)).lower(x).as_text()

    row = formats.make("nvfp4", outer="row")
    assert "tensor<4x7x4xi16>" in program(row, jnp.bfloat16)
    assert "tensor<4x7x4xi16>" not in program(row, jnp.float32)
    assert "tensor<4x7x4xi16>" not in program(
        formats.make("nvfp4", outer="row", outer_rounding="fp32"), jnp.bfloat16
    )
