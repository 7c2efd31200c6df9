"""What `sample` and `eval` share: a policy, published as a recipe's rollout side has it.

It comes from a model's files and a named recipe, or from a run's last good checkpoint with all that the
run's configuration says.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from absl import flags

from fp4rl_jax import interchange, models, plugins, recipes
from fp4rl_jax.arrays import DTYPES
from fp4rl_jax.cli import _flags, _job
from fp4rl_jax.config import Config
from fp4rl_jax.config import load as load_config
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.rollout import Calibration, Published, SamplingConfig, calibrate, publish
from fp4rl_jax.runs import Checkpointer, RunNotFoundError
from fp4rl_jax.runs.directory import CONFIG
from fp4rl_jax.text import Tokenizer, encode_prompts

#: Flags that say what a run has said already.
_OF_A_RUN = ("model", "recipe", "dtype")

#: What a recipe that calibrates looks at here, where there is no first batch: one chat each.
CALIBRATION_PROMPTS = tuple(
    [{"role": "user", "content": text}]
    for text in (
        "What is 7 + 15? Answer with the number only.",
        "Write one sentence about the sea.",
        "def add(a, b): what does this function return?",
        "Name three colours and three animals.",
    )
)
CALIBRATION_WIDTH = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A published model and what is needed to talk to it.

    Attributes:
        published, config, side, tokenizer: the rollout side, as the sampler takes it.
        recipe: name of the recipe whose rollout side this is.
        origin: where the weights came from, for the reader.
    """

    published: Published
    config: ModelConfig
    side: Side
    tokenizer: Tokenizer
    recipe: str
    origin: str


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags that choose and load a policy."""
    flags.DEFINE_string(
        "run",
        None,
        "a run's folder: the policy of its last good checkpoint, published as the run publishes it",
        flag_values=values,
    )
    flags.DEFINE_string("model", "models/smollm2", "a checkpoint folder or a GGUF file", flag_values=values)
    flags.DEFINE_string(
        "recipe", "bf16", "recipe whose rollout side is used (qat_w4a4: FP4)", flag_values=values
    )
    flags.DEFINE_enum("dtype", "bfloat16", sorted(DTYPES), "dtype of the activations", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 64, "longest answer, in tokens", flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token", flag_values=values)
    flags.DEFINE_integer("top_k", 0, "keep the k likeliest tokens; 0 keeps all", flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "keep the likeliest tokens up to this mass", flag_values=values)
    flags.DEFINE_float("min_p", 0.0, "keep tokens above this share of the likeliest one", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the sampling", flag_values=values)


def run_config(values: flags.FlagValues, *, name: str) -> Config | None:
    """The configuration of `--run`, or None without it.

    Raises:
        Done: flags say again what the run says (code 2, one line on stderr).
        RunNotFoundError: the folder holds no run.
        ConfigError: its configuration is not understood.
    """
    if values["run"].value is None:
        return None
    given = [f"--{flag}" for flag in _OF_A_RUN if values[flag].present]
    if given:
        print(
            f"fp4rl {name}: --run brings its own model, recipe and dtype: drop {', '.join(given)} or --run",
            file=sys.stderr,
        )
        raise _flags.Done(2)
    file = Path(_flags.get(values, "run", str)) / CONFIG
    if not file.is_file():
        raise RunNotFoundError(f"--run {file.parent}: no run there (it has no {CONFIG})")
    return load_config([str(file)])


def load(values: flags.FlagValues, run: Config | None) -> Policy:
    """The policy that the flags name; `run` is what `run_config` found.

    Raises:
        ValueError: the recipe does not exist or does not fit the model, or the checkpoint is wrong.
        OSError: the checkpoint cannot be read.
        RunError: no checkpoint of the run is sound; the message names each and its fault.
        PublishError: its weights are not finite, or differ between the sides.
    """
    return _from_model(values) if run is None else _from_run(Path(_flags.get(values, "run", str)), run)


def _from_run(folder: Path, config: Config) -> Policy:
    """The rollout side of the last sound checkpoint; later ones that are damaged are named."""
    if not (folder / "checkpoints").is_dir():
        raise RunNotFoundError(f"--run {folder}: the run has saved no checkpoint yet")
    made = _job.builder(config)
    restored = Checkpointer(folder / "checkpoints").restore(made.template())
    return Policy(
        published=made.publish(restored.state),
        config=made.model,
        side=made.sides.rollout.without_capture(),
        tokenizer=made.tokenizer,
        recipe=config.recipe.rollout.name,
        origin=f"{folder} after {restored.step} steps",
    )


def _from_model(values: flags.FlagValues) -> Policy:
    recipe, dtype = _flags.get(values, "recipe", str), _flags.get(values, "dtype", str)
    module = plugins.load(recipes, recipe)
    path = _flags.get(values, "model", str)
    loaded = interchange.load(path, dtype="float32")
    spec = module.rollout(module.Config())
    specs = spec.resolve(models.sites(loaded.config))
    side = Side(specs=specs, dtype=dtype, kv=spec.kv).without_capture()
    calibration = _calibration(loaded, side) if calibrate.is_needed(side) else None
    published = publish(loaded.params, config=loaded.config, side=side, version=0, calibration=calibration)
    return Policy(
        published=published,
        config=loaded.config,
        side=side,
        tokenizer=loaded.tokenizer,
        recipe=recipe,
        origin=path,
    )


def _calibration(loaded: interchange.Loaded, side: Side) -> Calibration:
    """Statistics of the built-in prompts, for a recipe that chooses by them."""
    prompts, mask = encode_prompts(loaded.tokenizer, CALIBRATION_PROMPTS, width=CALIBRATION_WIDTH)
    return calibrate.first(
        loaded.params, jnp.asarray(prompts), jnp.asarray(mask), config=loaded.config, side=side
    )


def sampling(values: flags.FlagValues, tokenizer: Tokenizer, run: Config | None) -> SamplingConfig:
    """The sampling that the flags describe; ValueError naming the flag's value if it is out of range.

    Answers are as long as the run's where there is one and the flag does not say.
    """
    found: dict[str, Any] = {
        name: values[name].value for name in ("temperature", "max_new_tokens", "top_k", "top_p", "min_p")
    }
    if run is not None and not values["max_new_tokens"].present:
        found["max_new_tokens"] = run.rollout.max_new_tokens
    return SamplingConfig(**found, stop_tokens=tokenizer.stop_ids, pad_token=tokenizer.pad_id)


def describe(policy: Policy) -> str:
    """One line about what answers: sites, bits and dtype."""
    bits = policy.published.bits_per_weight
    packed = f"{bits:.2f} bits a weight at its quantized sites" if bits == bits else "weights unquantized"
    return (
        f"{policy.origin}: recipe {policy.recipe} (rollout side), {packed}, activations {policy.side.dtype}"
    )
