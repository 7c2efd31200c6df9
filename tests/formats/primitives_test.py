"""What quantizing is compiled from: nothing that a compiler folds, approximates or flushes.

The program of every option is traced, not compiled, and its operations are listed: no logarithm or
exponential, no float division (a constant one becomes a multiplication), no cast to a narrow float
(a GPU compiler folds it and its inverse away).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import fp4rl_jax
from fp4rl_jax import Stochastic, formats

FORBIDDEN = {"log", "log1p", "log2", "exp", "exp2", "expm1", "pow", "integer_pow", "sqrt", "rsqrt"}


def equations(jaxpr) -> Iterator:
    """All equations of a jaxpr, those of the programs it calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from equations(inner)


def operations(fmt, dtype, **options) -> list[tuple[str, str]]:
    """(primitive, dtype of its first result) of quantizing and dequantizing an array."""
    given = {"outer_scale": 0.5} if fmt.span == "static" else {}

    def both(x):
        return fp4rl_jax.quantize(x, fmt, **given, **options).dequantize()

    jaxpr = jax.make_jaxpr(both)(jax.ShapeDtypeStruct((32, 256), dtype)).jaxpr
    return [(e.primitive.name, str(e.outvars[0].aval.dtype)) for e in equations(jaxpr) if e.outvars]


@pytest.mark.parametrize("name", formats.names())
def test_no_operation_that_a_compiler_may_change(name):
    for fmt in formats.variations(name):
        for dtype in (jnp.float32, jnp.bfloat16):
            found = operations(fmt, dtype)
            assert len(found) > 50, "the traversal sees the inner programs"
            assert not [op for op in found if op[0] in FORBIDDEN], fmt
            assert not [op for op in found if op[0] == "div" and op[1].startswith("float")], fmt
            assert not [op for op in found if op[1].startswith(("float8", "float4", "float16"))], fmt


def test_stochastic_rounding_neither():
    for name in formats.names():
        found = operations(formats.make(name), jnp.float32, rounding=Stochastic(), key=jax.random.key(0))
        assert not [op for op in found if op[0] in FORBIDDEN or op == ("div", "float32")], name
