"""Every recipe file through one suite, and a covering set of trainer/rollout pairs.

No recipe is named here: what is asked of one is asked of all, found by folder.
"""

import dataclasses
import functools
import itertools
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import ops, plugins, recipes
from fp4rl_jax.ops.rounding import settle
from fp4rl_jax.ops.spec import MatmulSpec, SideSpec, SiteSpecs
from fp4rl_jax.quantizers.residual import ChannelStats

NAMES = plugins.names(recipes)
#: Each trainer with its own rollout and with another's: every recipe on either side twice.
PAIRS = tuple((a, b) for i, a in enumerate(NAMES) for b in (a, NAMES[(i + 1) % len(NAMES)]))
DENSE = ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/down")
MOE = ("attn/qkv", "attn/out", "experts/gate_up", "experts/down")
NEVER = ("embed", "head", "final_norm", "attn_norm", "router", "moe_router")
SIDES = ("trainer", "rollout")


def build(recipe: ModuleType, side: str, **knobs: object) -> SideSpec:
    return getattr(recipe, side)(recipe.Config(**knobs))


def knobs_of(recipe: ModuleType) -> list[dict[str, object]]:
    """The default config, and one for each other value of a field that lists its values."""
    import typing

    hints = typing.get_type_hints(recipe.Config)
    fields = {field.name: typing.get_args(hints[field.name]) for field in dataclasses.fields(recipe.Config)}
    listed = {name: values for name, values in fields.items() if all(isinstance(v, str) for v in values)}
    return [{}, *({name: value} for name, values in listed.items() for value in values)]


def check_config(recipe: ModuleType) -> None:
    """Frozen, keyword-only, buildable by defaults, equal and hashable by value."""
    assert dataclasses.is_dataclass(recipe.Config)
    params = recipe.Config.__dataclass_params__  # pyright: ignore[reportAttributeAccessIssue]
    assert params.frozen and params.kw_only
    for knobs in knobs_of(recipe):
        assert recipe.Config(**knobs) == recipe.Config(**knobs)
        for side in SIDES:
            assert build(recipe, side, **knobs) == build(recipe, side, **knobs)
            assert hash(build(recipe, side, **knobs)) == hash(build(recipe, side, **knobs))
    assert recipe.__doc__ and recipe.trainer.__doc__ and recipe.rollout.__doc__


def check_sites(recipe: ModuleType) -> None:
    """The defaults fit a dense model and a mixture; what must stay unquantized does."""
    for side, sites in itertools.product(SIDES, (DENSE, MOE)):
        spec = build(recipe, side)
        assert tuple(site for site, _ in spec.resolve(sites).items) == sites
        untouched = spec.resolve((*sites, *NEVER))
        assert all(untouched[name] == ops.HIGH_PRECISION for name in NEVER)


@functools.partial(jax.jit, static_argnames="specs")
def trainer_step(x: jax.Array, params: dict[str, jax.Array], key: jax.Array, *, specs: SiteSpecs):
    """Output and gradients of a two-site block."""

    def loss(params):
        y = block(x, params, specs, key)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    (_, y), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return y, grads


@functools.partial(jax.jit, static_argnames="specs")
def rollout_step(x: jax.Array, published: dict[str, object], key: jax.Array, *, specs: SiteSpecs):
    return block(x, ops.prepare(published), specs, key)


def block(x: jax.Array, params, specs: SiteSpecs, key: jax.Array) -> jax.Array:
    h = ops.matmul(x, params["mlp/gate_up"], specs["mlp/gate_up"], key=key)
    h = settle(ops.pointwise(jax.nn.silu, h.astype(jnp.float32), order="fixed"), h.dtype)
    return ops.matmul(h, params["mlp/down"], specs["mlp/down"], key=key)


def publish(params: dict[str, jax.Array], specs: SiteSpecs) -> dict[str, object]:
    """Published weights; where a spec needs calibration, of inputs whose channels are all alike."""

    def one(w: jax.Array, spec: MatmulSpec) -> object:
        if spec.weight is None:
            return w.astype(jnp.bfloat16)
        if not spec.needs_calibration:
            return ops.quantize_weight(w, spec.weight)
        ones = jnp.ones(w.shape[-1], jnp.float32)
        return ops.calibrated_weight(w, spec, ChannelStats(energy=ones, residual_max=ones, act_max=ones))

    return {site: one(w, specs[site]) for site, w in params.items()}


def inputs() -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16)
    params = {
        "mlp/gate_up": jnp.asarray(rng.normal(size=(48, 64)) * 0.2, jnp.float32),
        "mlp/down": jnp.asarray(rng.normal(size=(64, 48)) * 0.2, jnp.float32),
    }
    return x, params, jax.random.key(3)


def forward_of(specs: SiteSpecs) -> list[tuple]:
    """What the specs do in a forward without guidance."""
    acts = [spec.act and ops.unguided(spec.act) for _, spec in specs.items]
    return [
        (spec.weight, act, spec.residual, spec.smoothing)
        for (_, spec), act in zip(specs.items, acts, strict=True)
    ]


def check_pair(trainer: ModuleType, rollout: ModuleType) -> None:
    """Both sides run; equal specs give equal bits; equal weight quantizers give equal weights."""
    x, params, key = inputs()
    trained, rolled = build(trainer, "trainer").resolve(DENSE), build(rollout, "rollout").resolve(DENSE)
    y, grads = trainer_step(x, params, key, specs=trained)
    published = publish(params, rolled)
    sampled = rollout_step(x, published, key, specs=rolled)
    assert y.shape == sampled.shape == (4, 64)
    assert y.dtype == sampled.dtype == jnp.bfloat16
    assert np.all(np.isfinite(np.asarray(sampled, np.float32)))
    for site, grad in grads.items():
        assert grad.dtype == params[site].dtype
        assert np.all(np.isfinite(grad)) and np.abs(grad).max() > 0, site
    if forward_of(trained) == forward_of(rolled):
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(sampled, np.float32))
    gap = np.abs(np.asarray(y, np.float32) - np.asarray(sampled, np.float32)).max()
    assert gap <= 0.5 * np.abs(np.asarray(y, np.float32)).max()  # one model on both sides


@pytest.mark.parametrize("name", NAMES)
def test_config(name: str) -> None:
    check_config(plugins.load(recipes, name))


@pytest.mark.parametrize("name", NAMES)
def test_sites(name: str) -> None:
    check_sites(plugins.load(recipes, name))


@pytest.mark.parametrize("name", NAMES)
def test_the_experts_of_a_dense_model_are_refused_by_name(name: str) -> None:
    recipe = plugins.load(recipes, name)
    if "sites" not in {field.name for field in dataclasses.fields(recipe.Config)}:
        pytest.skip(f"{name} has no choice of sites")
    sides = [build(recipe, side, sites="routed_experts") for side in SIDES]
    assert any(spec.rules for spec in sides)
    for spec in filter(lambda spec: spec.rules, sides):
        with pytest.raises(ValueError, match=r"matches no site of this model.*'experts/\*'"):
            spec.resolve(DENSE)
        specs = spec.resolve(MOE)
        assert specs["attn/qkv"] == ops.HIGH_PRECISION
        assert specs["experts/down"] != ops.HIGH_PRECISION


@pytest.mark.fast_cases("bf16-bf16", "qat_w4a4-quads", "rollout_resq-rollout_resq", "trace-trace")
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pair(pair: tuple[str, str]) -> None:
    trainer, rollout = (plugins.load(recipes, name) for name in pair)
    check_pair(trainer, rollout)


@functools.partial(jax.jit, static_argnames=("specs", "rows"))
def alone_and_among(
    x: jax.Array, published: dict[str, object], key: jax.Array, *, specs: SiteSpecs, rows: int
):
    """The first rows by themselves, and among all, in the fixed order."""
    weight, spec = ops.prepare(published)["mlp/gate_up"], specs["mlp/gate_up"]
    both = (
        ops.matmul(x[:rows], weight, spec, key=key, order="fixed"),
        ops.matmul(x, weight, spec, order="fixed"),
    )
    return both[0], both[1][:rows]


@pytest.mark.fast_cases("qat_w4a4", "rollout_resq", "fp8_rollout")
@pytest.mark.parametrize("name", NAMES)
def test_batch_invariant_means_batch_invariant(name: str) -> None:
    """Where a rollout's specs say so, a row has the same bits alone and among others."""
    x, params, key = inputs()
    specs = build(plugins.load(recipes, name), "rollout").resolve(DENSE)
    if not specs["mlp/gate_up"].batch_invariant:
        pytest.skip(f"{name} declares that it is not")
    loud = x.at[2:].multiply(100.0)
    alone, among = alone_and_among(loud, publish(params, specs), key, specs=specs, rows=2)
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(among, np.float32))


TOY = '''
"""A toy: MXFP4 weights on both sides."""

import dataclasses

from fp4rl_jax import formats
from fp4rl_jax.ops.rounding import settle
from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Quantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """No knobs."""


def trainer(config: Config) -> SideSpec:
    """MXFP4 weights."""
    return SideSpec(rules=(("*/*", MatmulSpec(weight=Quantizer(formats.make("mxfp4")))),))


def rollout(config: Config) -> SideSpec:
    """MXFP4 weights."""
    return trainer(config)
'''


def test_a_recipe_is_one_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_recipe.py").write_text(TOY)
    monkeypatch.setattr(recipes, "__path__", [*recipes.__path__, str(tmp_path)])
    assert "toy_recipe" in plugins.names(recipes)
    toy = plugins.load(recipes, "toy_recipe")
    check_config(toy)
    check_sites(toy)
    check_pair(toy, toy)
    with pytest.raises(ValueError, match="did you mean 'toy_recipe'"):
        plugins.load(recipes, "toy_recpe")
