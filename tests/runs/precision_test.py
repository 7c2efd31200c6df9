"""What runs in which precision: sites on both sides, what stays unquantized, and how it is shown."""

import pytest

from fp4rl_jax import models, plugins, recipes
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.runs import precision

DENSE = ModelConfig()
MOE = ModelConfig(family="qwen3_moe", qk_norm=True, num_experts=4, num_active=2, d_expert=64)


def _sides(recipe: str, model: ModelConfig) -> tuple[Side, Side]:
    module = plugins.load(recipes, recipe)
    specs = (make(module.Config()).resolve(models.sites(model)) for make in (module.trainer, module.rollout))
    trainer, rollout = (Side(specs=spec) for spec in specs)
    return trainer, rollout


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", plugins.names(recipes))
def test_every_site_of_every_recipe_is_reported(recipe: str, model: ModelConfig) -> None:
    for side in _sides(recipe, model):
        found = precision.site_precisions(model, side, num_rows=8)
        assert tuple(found) == models.sites(model)
        for site, report in found.items():
            quantized = side.specs[site].weight is not None or side.specs[site].act is not None
            assert (report.executed == "unquantized") == (not quantized)
            assert report.executed in ("native", "emulated-exact", "unquantized", "reference")


def test_an_unquantized_side_runs_in_its_own_dtype() -> None:
    trainer, _ = _sides("naive_nvfp4", DENSE)
    report = precision.site_precisions(DENSE, trainer, num_rows=8)["attn/qkv"]
    assert (report.weight, report.act, report.backward) == ("bfloat16", "bfloat16", "unquantized")


def test_a_quantizer_is_shown_with_the_options_that_are_not_the_default() -> None:
    _, rollout = _sides("qat_w4a4", DENSE)
    report = precision.site_precisions(DENSE, rollout, num_rows=8)["mlp/down"]
    assert (report.weight, report.act, report.executed) == ("nvfp4", "nvfp4(outer=row)", "emulated-exact")


def test_the_fixed_order_changes_the_implementation_and_says_why() -> None:
    _, rollout = _sides("qat_w4a4", DENSE)
    fixed = Side(specs=rollout.specs, order="fixed")
    report = precision.site_precisions(DENSE, fixed, num_rows=8)["attn/out"]
    assert report.implementation == "rows"
    assert "order is 'fixed'" in report.reason


def test_what_a_side_leaves_unquantized_is_listed_and_diffed() -> None:
    trainer, rollout = _sides("qat_w4a16", DENSE)
    ours, theirs = precision.unquantized(DENSE, trainer), precision.unquantized(DENSE, rollout)
    assert theirs == (
        "embed",
        "final_norm",
        "layers/attn_norm",
        "layers/mlp_norm",
        "head (tied to embed)",
        "kv cache",
    )
    activations = {f"{site} (activations)" for site in models.sites(DENSE)}
    assert set(ours) - set(theirs) == activations
    assert precision.difference(ours, theirs).splitlines() == [
        f"only the trainer: {site} (activations)" for site in models.sites(DENSE)
    ]
    assert precision.difference(theirs, theirs) == "none"


def test_the_router_and_the_embedding_are_never_quantized() -> None:
    for recipe in plugins.names(recipes):
        for side in _sides(recipe, MOE):
            assert {"layers/moe/router", "embed"} <= set(precision.unquantized(MOE, side))


def test_the_table_marks_sites_whose_sides_differ() -> None:
    sides = [precision.site_precisions(DENSE, side, num_rows=8) for side in _sides("qat_w4a16", DENSE)]
    lines = precision.table(*sides).splitlines()
    assert len(lines) == 1 + 2 * len(models.sites(DENSE))
    assert [line.split()[:2] for line in lines[1::2]] == [[site, "*"] for site in models.sites(DENSE)]
    same = [precision.site_precisions(DENSE, side, num_rows=8) for side in _sides("qat_w4a4", DENSE)]
    assert "*" not in precision.table(*same)
    assert precision.reasons(*same).count("\n") == 0


def test_the_manifest_form_is_plain() -> None:
    trainer, rollout = _sides("bf16", DENSE)
    sites = {"trainer": trainer, "rollout": rollout}
    found = precision.implementations(
        {name: precision.site_precisions(DENSE, side, num_rows=4) for name, side in sites.items()}
    )
    assert found["rollout"]["attn/qkv"]["executed"] == "unquantized"
    assert set(found) == {"trainer", "rollout"}
