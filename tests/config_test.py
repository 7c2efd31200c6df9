"""The root configuration: composition, plug-in sections, refusals, and equality of two builds."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fp4rl_jax import algorithms, config, corrections, plugins, recipes, tasks

ROOT = Path(__file__).parent.parent
CI = str(ROOT / "configs" / "ci" / "grpo.toml")


def test_the_defaults_build_without_a_file() -> None:
    assert config.load() == config.Config()
    assert json.loads(config.dump(config.Config()))["recipe"] == {"name": "bf16", "kv": "none"}


@pytest.mark.parametrize("name", plugins.names(recipes))
def test_any_recipe_goes_over_a_ci_config(name: str) -> None:
    built = config.load([CI], [f"recipe.name={name}"])
    assert (built.recipe.trainer.name, built.recipe.rollout.name) == (name, name)
    assert built == config.load([CI], [f"recipe.name={name}"])
    assert hash(built) == hash(config.load([CI], [f"recipe.name={name}"]))


GAPS = [
    ([], ("bfloat16", "bfloat16", None)),
    (["engine_gap=none", "trainer.microbatch_rows=8", "ops.order=fixed"], ("bfloat16", "bfloat16", 8)),
    (["engine_gap=dtype", "trainer.dtype=bfloat16", "rollout.dtype=float32"], ("bfloat16", "float32", None)),
    (["engine_gap=dtype"], ("float32", "bfloat16", None)),
    (["engine_gap=dtype", "trainer.dtype=float32", "trainer.microbatch_rows=8"], ("float32", "bfloat16", 8)),
    (["engine_gap=rows"], ("bfloat16", "bfloat16", 8)),  # one group at a time
    (["engine_gap=rows", "loop.num_prompts=1"], ("bfloat16", "bfloat16", 4)),
    (["engine_gap=rows", "trainer.microbatch_rows=16"], ("bfloat16", "bfloat16", 16)),
    (["engine_gap=rows", "trainer.dtype=float32", "rollout.dtype=float32"], ("float32", "float32", 8)),
]


@pytest.mark.parametrize(("overrides", "expected"), GAPS)
def test_a_declared_engine_gap_becomes_settings(overrides, expected, tmp_path) -> None:
    """Dtypes, the trainer's rows, one engine of attention; what is resolved loads as itself."""
    found = config.load([], ["loop.group_size=8", *overrides])
    declared = any(word.startswith("engine_gap") for word in overrides)
    assert found.ops.fused_attention == ("never" if declared else "auto")
    assert (found.trainer.dtype, found.rollout.dtype, found.trainer.microbatch_rows) == expected
    (tmp_path / "config.json").write_text(config.dump(found))
    assert config.load([str(tmp_path / "config.json")]) == found


def test_kernels_that_are_asked_for_stay_under_a_declared_gap() -> None:
    found = config.load([], ["engine_gap=none", "ops.fused_attention=auto"])
    assert found.ops.fused_attention == "auto"


@pytest.mark.parametrize(
    ("overrides", "gap"),
    [
        ([], "none"),
        (["trainer.dtype=float32"], "dtype"),
        (["trainer.dtype=float32", "trainer.microbatch_rows=8"], "dtype"),
        (["trainer.microbatch_rows=8"], "rows"),
        (["trainer.microbatch_rows=8", "ops.order=fixed"], "none"),
    ],
)
def test_an_undeclared_engine_gap_is_what_the_settings_make(overrides, gap, tmp_path) -> None:
    found = config.load([], ["loop.group_size=8", *overrides])
    assert (found.engine_gap, found.ops.fused_attention) == (gap, "auto")
    (tmp_path / "config.json").write_text(config.dump(found))
    assert config.load([str(tmp_path / "config.json")]) == found


CONTRADICTIONS = [
    (["engine_gap=none", "trainer.dtype=float32"], "engine_gap = 'none': expected one dtype on both sides"),
    (
        ["engine_gap=none", "trainer.microbatch_rows=8"],
        "expected trainer.microbatch_rows = none or all 64 rows of an update, got 8",
    ),
    (["engine_gap=dtype", "trainer.dtype=bfloat16"], "expected trainer.dtype = 'float32', got 'bfloat16'"),
    (["engine_gap=dtype", "rollout.dtype=float32"], "expected rollout.dtype = 'bfloat16', got 'float32'"),
    (["engine_gap=rows", "trainer.dtype=float32"], "engine_gap = 'rows': expected one dtype"),
    (["engine_gap=rows", "trainer.microbatch_rows=64"], "below the 64 rows of an update, got 64"),
    (
        ["engine_gap=rows", "loop.num_prompts=1", "loop.group_size=1"],
        "below the 1 rows of an update, got None",
    ),
    (["engine_gap=rows", "ops.order=fixed"], "there would be no gap"),
    (["engine_gap=row"], "engine_gap: unknown value 'row': did you mean 'rows'"),
]


@pytest.mark.parametrize(("overrides", "message"), CONTRADICTIONS)
def test_settings_that_contradict_the_gap_are_refused(overrides, message) -> None:
    with pytest.raises(config.ConfigError) as raised:
        config.load(
            [], ["loop.num_prompts=8", "loop.group_size=8", "algorithm.name=reinforce_pp", *overrides]
        )
    assert message in str(raised.value)


@pytest.mark.parametrize("name", plugins.names(algorithms))
def test_any_algorithm_goes_over_a_ci_config(name: str) -> None:
    assert config.load([CI], [f"algorithm.name={name}"]).algorithm.name == name


@pytest.mark.parametrize("name", plugins.names(corrections))
def test_any_correction_goes_over_a_ci_config(name: str) -> None:
    assert config.load([CI], [f"correction.name={name}"]).correction.name == name


def test_equal_configs_trace_once() -> None:
    traces = []

    def step(x: jax.Array, settings: config.Config) -> jax.Array:
        traces.append(settings)
        return x * settings.loop.steps

    jitted = jax.jit(step, static_argnums=1)
    for _ in range(2):
        assert jitted(jnp.float32(2), config.load([CI], ["loop.steps=3"])) == 6
    assert len(traces) == 1


@pytest.mark.parametrize(
    "override, message",
    [
        ("recipe.name=qat_w4a5", "recipe.name: unknown recipe 'qat_w4a5': did you mean 'qat_w4a"),
        ("recipe.sights=mlp", "unknown config key 'recipe.sights': did you mean 'recipe.sites'?"),
        ("recipe.sites=mlp", "recipe.sites: unknown value 'mlp'"),
        ("recipe.sites=routed_experts", "recipe: unknown site pattern (it matches no site of this model)"),
        ("algorithm.name=grpoo", "algorithm.name: unknown algorithm 'grpoo': did you mean 'grpo'?"),
        (
            "algorithm.clip_hihg=1",
            "unknown config key 'algorithm.clip_hihg': did you mean 'algorithm.clip_high'?",
        ),
        ("algorithm.clip_high=wide", "algorithm.clip_high: expected float, got 'wide'"),
        ("correction.cap=0.5", "correction: cap is 0.5, expected a finite number of at least 1"),
        ("task.terms=1", "task: terms is 1, expected at least 2"),
        ("loop.group_size=1", "algorithm: "),
        ("loop.steps=0", "loop.steps = 0: expected at least 1"),
        ("trainer.optim.lr=quick", "trainer.optim.lr: expected float, got 'quick'"),
        ("trainer.optim.rl=1", "unknown config key 'trainer.optim.rl': did you mean 'trainer.optim.lr'?"),
        ("rollout.temperature=0", "rollout: temperature = 0.0 is greedy decoding"),
        ("rollout.top_k=20", "rollout: top_k = 20"),
        ("moe.replay=on", "moe.replay = 'on', moe.balance_coef = 0.0: the model has no experts"),
        ("mesh.data=0", "mesh: mesh axis 'data' must be at least 1, or -1 for the rest, got 0"),
        ("mesh.context=2", "mesh: context = 2: attention over a sequence split along time does not exist"),
        ("mesh.fsdp=3", "loop.group_size = 8 rows do not divide over data * fsdp = 3 devices"),
        ("model.shape.num_heads=3", "model.shape: num_heads (3) is not a multiple of num_kv_heads (2)"),
        ("model.path=models/smollm2", "model: path = 'models/smollm2' brings its own shape"),
        ("ops.order=fixd", "ops.order: unknown value 'fixd': did you mean 'fixed'?"),
        ("trainr.dtype=float32", "unknown config key 'trainr': did you mean 'trainer'?"),
    ],
)
def test_what_cannot_work_is_refused_before_any_device(override: str, message: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.load([CI], [override])
    assert message in str(caught.value)


def test_every_task_is_typed_by_its_own_file() -> None:
    for name in plugins.names(tasks):
        with pytest.raises(config.ConfigError, match=r"task\.no_such_knob"):
            config.load([CI], [f"task.name={name}", "task.no_such_knob=1"])


def test_a_dumped_config_loads_as_itself(tmp_path: Path) -> None:
    overrides = ["recipe.rollout.name=fp8_rollout", "trainer.optim.clip_norm=none", "trainer.trainable=['*']"]
    built = config.load([CI], overrides)
    path = tmp_path / "config.json"
    path.write_text(config.dump(built))
    assert config.load([str(path)]) == built
    assert config.load([str(path)], ["loop.steps=9"]).loop.steps == 9
