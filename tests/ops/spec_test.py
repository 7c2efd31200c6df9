"""Sides: patterns to sites, the errors of patterns that match nothing."""

import pytest

from fp4rl_jax import formats, ops
from fp4rl_jax.quantizers import Quantizer

DENSE = ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/down")
W4 = ops.MatmulSpec(weight=Quantizer(formats.make("nvfp4")))


def test_the_first_matching_rule_wins_and_the_rest_stays_plain() -> None:
    side = ops.SideSpec(rules=(("attn/out", ops.HIGH_PRECISION), ("attn/*", W4)))
    specs = side.resolve(DENSE)
    assert [specs[site] == W4 for site in DENSE] == [True, False, False, False]


def test_a_pattern_without_a_site_is_an_error_with_the_nearest() -> None:
    side = ops.SideSpec(rules=(("mlp/gate_pu", W4),))
    with pytest.raises(ValueError, match=r"'mlp/gate_pu': did you mean 'mlp/gate_up'"):
        side.resolve(DENSE)


def test_an_unknown_site_is_an_error_with_the_nearest() -> None:
    specs = ops.SideSpec().resolve(DENSE)
    with pytest.raises(ValueError, match=r"unknown site 'mlp/dwn': did you mean 'mlp/down'"):
        specs["mlp/dwn"]


def test_sides_are_equal_by_value() -> None:
    make = lambda: ops.Side(specs=ops.SideSpec(rules=(("*/*", W4),)).resolve(DENSE))  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
