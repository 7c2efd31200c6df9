"""What runs in which precision: sites on both sides, what stays unquantized, and how it is shown."""

import json

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
def test_every_site_of_every_recipe_is_in_the_manifest(recipe: str, model: ModelConfig) -> None:
    trainer, rollout = _sides(recipe, model)
    found = precision.implementations({"trainer": trainer, "rollout": rollout}, model)
    assert {name: tuple(sites) for name, sites in found.items()} == dict.fromkeys(
        ("trainer", "rollout"), models.sites(model)
    )
    executed = {site["precision"] for sites in found.values() for site in sites.values()}
    assert executed <= {"native", "emulated-exact", "reference"}
    assert json.loads(json.dumps(found)) == found


def test_a_quantizer_is_shown_with_the_options_that_are_not_the_default() -> None:
    _, rollout = _sides("qat_w4a4", DENSE)
    report = precision.implementations({"rollout": rollout}, DENSE)["rollout"]["mlp/down"]
    assert (report["weight"], report["act"]) == ("nvfp4", "nvfp4(outer=row)")


def test_the_reason_of_the_fixed_order_is_given() -> None:
    _, rollout = _sides("qat_w4a4", DENSE)
    text = precision.reasons({"rollout": Side(specs=rollout.specs, order="fixed")}, DENSE)
    assert text.startswith("rows: ")
    assert "order is 'fixed'" in text


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
    lines = precision.table(*_sides("qat_w4a16", DENSE), DENSE).splitlines()
    assert len(lines) == 1 + 2 * len(models.sites(DENSE))
    assert [line.split()[:2] for line in lines[1::2]] == [[site, "*"] for site in models.sites(DENSE)]
    assert "*" not in precision.table(*_sides("qat_w4a4", DENSE), DENSE)
