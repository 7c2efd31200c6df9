"""Rollout-ResQ's options: what each selection may say, and gradients that are rounded at random."""

import pytest

from fp4rl_jax.ops.spec import MatmulSpec
from fp4rl_jax.quantizers import Stochastic
from fp4rl_jax.quantizers.residual import Residual
from fp4rl_jax.recipes import rollout_resq


def spec_of(side: str, **knobs: object) -> MatmulSpec:
    config = rollout_resq.Config(**knobs)  # pyright: ignore[reportArgumentType]
    return getattr(rollout_resq, side)(config).rules[0][1]


def second_of(**knobs: object) -> Residual:
    found = spec_of("rollout", **knobs).residual
    assert isinstance(found, Residual)
    return found


@pytest.mark.parametrize(
    "knobs, columns, invariant",
    [
        ({"selection": "channels"}, False, False),
        ({"selection": "channels", "scope": "static"}, True, True),
        ({"selection": "channels", "scope": "token"}, False, True),
        ({"selection": "tiles_32x64"}, False, False),
        ({"selection": "tiles_32x64", "tile_rows": 1}, False, False),
        ({"selection": "pattern_2_4"}, False, True),
        ({"selection": "dense"}, False, True),
    ],
)
def test_a_selection_says_whether_it_is_chosen_at_publish_and_alone(knobs, columns, invariant):
    second = second_of(**knobs)
    assert (second.needs_columns, second.batch_invariant) == (columns, invariant)
    assert second.order == "quantize_first"
    assert getattr(second.selection, "rows", knobs.get("tile_rows", 32)) == knobs.get("tile_rows", 32)


@pytest.mark.parametrize(
    "knobs", [{"scope": "static"}, {"tile_rows": 1}, {"selection": "dense", "scope": "token"}]
)
def test_an_option_of_another_selection_is_refused(knobs):
    with pytest.raises(ValueError, match="is for selection = .*, got selection = "):
        rollout_resq.Config(**knobs)


@pytest.mark.parametrize("knobs", [{"rounding": "stochastic"}, {"grad_outer": "row"}])
@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_an_option_of_gradients_that_are_not_quantized_is_refused(backward, knobs):
    with pytest.raises(ValueError, match=f"of quantized gradients: .*, got backward = '{backward}'"):
        rollout_resq.Config(backward=backward, **knobs)


@pytest.mark.parametrize(
    "fmt, option, value",
    [("hif4", "scale_rounding", "up"), ("nvfp4", "scale_rounding", "up"), ("mxfp4", "scale_rule", "rceil")],
)
def test_gradients_rounded_at_random_are_never_clipped(fmt, option, value):
    random = spec_of("trainer", format=fmt, rounding="stochastic").grad
    nearest = spec_of("trainer", format=fmt).grad
    assert random is not None and nearest is not None and random.rounding == Stochastic()
    assert getattr(random.fmt, option) == value != getattr(nearest.fmt, option)
    for operand in (spec_of("trainer", format=fmt, rounding="stochastic").act, nearest):
        assert operand is not None and operand.rounding != Stochastic()
