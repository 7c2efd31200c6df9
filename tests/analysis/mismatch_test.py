"""One fault planted at a time is the component that `fp4rl mismatch` names, in both columns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats, models
from fp4rl_jax.analysis import attribution, layers
from fp4rl_jax.analysis.attribution import Attribution, Gap, Swap, attribute
from fp4rl_jax.analysis.swaps import Pair, uncast
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.quantizers import Quantizer, residual
from fp4rl_jax.recipes._parts import act_of, residual_of
from fp4rl_jax.rollout import Published, publish
from tests.analysis import pairs


def pair_of(drawn: pairs.Drawn, **options: Any) -> Pair:
    plain = dataclasses.replace(drawn.trainer, kv=None, dtype="float32").without_capture()
    ours = publish(drawn.params, config=drawn.config, side=plain, version=0).params
    return Pair(
        config=drawn.config, trainer=drawn.trainer, rollout=drawn.rollout, trainer_params=ours,
        rollout_params=uncast(drawn.published.params, ours, drawn.rollout.dtype), out=drawn.out,
        **options,
    )  # fmt: skip


def other_rule(trainer: Side, rollout: Side) -> tuple[Side, Side]:
    """The rollout's activations in another rule of NVFP4's scales."""
    act = act_of("nvfp4", four_over_six="mse")
    return trainer, pairs.with_specs(rollout, lambda spec: dataclasses.replace(spec, act=act))


def other_cache(trainer: Side, rollout: Side) -> tuple[Side, Side]:
    """KV caches in two formats, one scale a token."""
    first, second = Quantizer(formats.make("nvfp4", outer="row")), Quantizer(formats.make("mxfp4"))
    return dataclasses.replace(trainer, kv=first), dataclasses.replace(rollout, kv=second)


def residual_removed(trainer: Side, rollout: Side) -> tuple[Side, Side]:
    """A residual that the trainer computes and the rollout does not."""
    second = residual_of("nvfp4", residual.make("pattern_2_4"), order="quantize_first")
    return pairs.with_specs(trainer, lambda spec: dataclasses.replace(spec, residual=second)), rollout


def other_dtype(trainer: Side, rollout: Side) -> tuple[Side, Side]:
    return trainer, dataclasses.replace(rollout, dtype="bfloat16")


def perturbed_router(published: Published) -> Published:
    router = published.params["layers"]["moe"]["router"]
    noise = jax.random.normal(jax.random.key(1), router.shape) * jnp.std(router) * 0.5
    moe = {**published.params["layers"]["moe"], "router": router + noise}
    params = {**published.params, "layers": {**published.params["layers"], "moe": moe}}
    return dataclasses.replace(published, params=params)


def coarse_head(published: Published) -> Published:
    """The head in bfloat16 beside float32 activations."""
    head = models.head_weight(published.params).astype(jnp.bfloat16)
    return dataclasses.replace(published, params={**published.params, "head": head})


FAULTS = {
    "weights": {"recipe": "qat_w4a4", "plant": pairs.changed_code},
    "activations": {"recipe": "qat_w4a4", "change": other_rule},
    "kv": {"recipe": "qat_w4a4", "change": other_cache},
    "router": {"recipe": "qat_w4a4", "model": "moe", "plant": perturbed_router},
    "head": {"recipe": "bf16", "plant": coarse_head},
    "residual": {"recipe": "qat_w4a4", "change": residual_removed},
    "engine": {"recipe": "qat_w4a4", "change": other_dtype},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_fault_is_named(name: str) -> None:
    drawn = pairs.drawn(**FAULTS[name])
    found = attribute(pair_of(drawn), drawn.scores)
    assert (found.named, found.opens_most) == (name, name)
    swap = next(swap for swap in found.swaps if swap.component == name)
    assert swap.opened is not None and swap.left is not None
    # fixed order, both ends: the mixed policies are the two sides
    assert found.rest_rollout.largest == found.rest_trainer.largest == 0.0
    assert found.explained == found.total
    if name != "engine":  # nothing else differs: the fault is the whole gap, and nothing is left without it
        assert swap.opened.mean == swap.closed == found.total.mean and swap.left.largest == 0.0
        others = [s for s in found.swaps if s.status == "measured" and s.component not in (name, "engine")]
        assert not others


@pytest.mark.slow
def test_guidance_that_is_a_token_late_is_named() -> None:
    drawn = pairs.drawn("trace")
    aligned = attribute(pair_of(drawn), drawn.scores)
    assert aligned.named == "nothing" and aligned.total.largest == 0.0
    late = dataclasses.replace(drawn, out=pairs.shifted(drawn.out, "mlp/gate_up"))
    found = attribute(pair_of(late), late.scores)
    assert (found.named, found.opens_most) == ("guidance", "guidance")
    assert found.rest_rollout.largest == found.rest_trainer.largest == 0.0
    seen = layers.by_layer(pair_of(late))["mlp/gate_up"]
    assert seen.flips is not None and seen.flips[0] == 0.0 < seen.flips[1]  # the deeper half is guided


@pytest.mark.slow
def test_every_recipe_is_explained_to_both_ends() -> None:
    """Smoothing, rotation and static columns are swapped without a rest."""
    for recipe in ("quads", "baseline_w4a4"):
        drawn = pairs.drawn(recipe)
        found = attribute(pair_of(drawn), drawn.scores)
        assert found.rest_rollout.largest == found.rest_trainer.largest == 0.0
        assert found.named == "activations"
        if recipe == "quads":
            swap = next(swap for swap in found.swaps if swap.component == "residual")
            assert swap.opened is None and swap.reason.startswith("in: the trainer has no quantized")
            assert swap.closed is not None and np.isfinite(swap.closed)
            sites = layers.by_layer(pair_of(drawn))
            for seen in sites.values():
                assert (seen.residual_after < seen.residual_before).all() and seen.flips is None
                np.testing.assert_array_equal(seen.underflow_trainer, 0.0)  # its activations are unquantized
                np.testing.assert_allclose(seen.relative**2, seen.residual_after, rtol=1e-5)


@pytest.mark.slow
def test_rows_at_a_time_are_the_engine_s() -> None:
    """In the free order a trainer that scores one row at a time may differ, and only by its engine."""
    drawn = pairs.drawn("qat_w4a4", order="free")
    found = attribute(pair_of(drawn, rows=1), drawn.scores)
    measured = [swap.component for swap in found.swaps if swap.status == "measured"]
    assert measured == ["engine"] and found.named in ("engine", "nothing", "unexplained rest")


def gap(mean: float) -> Gap:
    return Gap(mean=mean, largest=2 * mean, k3=0.0, moved=1.0, tokens=4)


def test_the_name_follows_the_columns() -> None:
    def made(rest: float, **closed: float) -> Attribution:
        swaps = tuple(
            Swap(component=name, status="measured", opened=gap(abs(x)), left=gap(1 - x), closed=x)
            for name, x in closed.items()
        )
        same = Swap(component="head", status="same", reason="equal values")
        return Attribution(
            total=gap(1.0),
            explained=gap(1.0),
            swaps=(*swaps, same),
            rest_rollout=gap(rest),
            rest_trainer=gap(0),
        )

    found = made(0.0, activations=0.7, residual=-0.9)
    assert (found.named, found.opens_most) == ("activations", "residual")
    assert found.interaction_in == pytest.approx(1.0 - 1.6)
    assert found.interaction_out == pytest.approx(1.0 - (0.7 - 0.9))
    assert made(0.8, activations=0.7).named == "unexplained rest"
    nothing = dataclasses.replace(made(0.0, engine=1e-6), total=gap(1e-6), explained=gap(1e-6))
    assert (nothing.named, nothing.opens_most) == ("nothing", "nothing")


def test_a_gap_is_of_the_masked_tokens() -> None:
    mask = np.array([[False, True, True]])
    found = attribution.gap(np.array([[9.0, -1.0, -2.0]]), np.array([[0.0, -1.5, -2.0]]), mask)
    assert (found.mean, found.largest, found.moved, found.tokens) == (0.25, 0.5, 0.5, 2)
    assert found.k3 == pytest.approx((np.exp(0.5) - 1.5) / 2)
    with pytest.raises(ValueError, match="finite"):
        attribution.gap(np.array([[0.0, np.nan, 0.0]]), np.zeros((1, 3)), mask)
