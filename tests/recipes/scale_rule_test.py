"""Formats and MXFP4's scale rule as options of the recipes that quantize both sides."""

import pytest

from fp4rl_jax import formats
from fp4rl_jax.ops.spec import MatmulSpec
from fp4rl_jax.quantizers.residual import Residual
from fp4rl_jax.recipes import naive_nvfp4, qat_w4a4, rollout_resq


def quantizers(spec: MatmulSpec) -> list:
    found = [spec.weight, spec.act]
    return [*found, spec.residual.quantizer] if isinstance(spec.residual, Residual) else found


@pytest.mark.parametrize("recipe", [qat_w4a4, rollout_resq])
@pytest.mark.parametrize("rule", [None, "floor", "even", "rceil", "ceil", "uos"])
def test_the_scale_rule_is_that_of_every_operand_of_the_forward(recipe, rule):
    config = recipe.Config(format="mxfp4", scale_rule=rule)
    for build in (recipe.trainer, recipe.rollout):
        found = quantizers(build(config).rules[0][1])
        assert [q.fmt for q in found] == [formats.make("mxfp4", scale_rule=rule or "floor")] * len(found)


@pytest.mark.parametrize("recipe", [qat_w4a4, rollout_resq])
def test_a_scale_rule_for_a_format_without_one_is_refused(recipe):
    with pytest.raises(ValueError, match="scale_rule = 'uos' is for format 'mxfp4', got format = 'hif4'"):
        recipe.Config(format="hif4", scale_rule="uos")


def test_the_default_format_is_the_naive_recipes():
    assert qat_w4a4.rollout(qat_w4a4.Config()) == naive_nvfp4.rollout(naive_nvfp4.Config())
