"""What `sample` and `eval` share: a model from a path, published as a recipe's rollout side has it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from absl import flags

from fp4rl_jax import interchange, models, plugins, recipes
from fp4rl_jax.arrays import DTYPES
from fp4rl_jax.cli import _flags
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.ops.spec import Side
from fp4rl_jax.rollout import Published, SamplingConfig, calibrate, publish
from fp4rl_jax.text import Tokenizer, encode_prompts

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
    """A published model and what is needed to talk to it."""

    published: Published
    config: ModelConfig
    side: Side
    tokenizer: Tokenizer
    recipe: str


def define_flags(values: flags.FlagValues) -> None:
    """Adds the flags that choose and load a policy."""
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


def load(values: flags.FlagValues) -> Policy:
    """Loads `--model` and publishes it as `--recipe` says.

    Raises:
        ValueError: the recipe does not exist or does not fit the model, or the checkpoint is wrong.
        OSError: the checkpoint cannot be read.
    """
    recipe, dtype = _flags.get(values, "recipe", str), _flags.get(values, "dtype", str)
    module = plugins.load(recipes, recipe)
    loaded = interchange.load(_flags.get(values, "model", str), dtype="float32")
    spec = module.rollout(module.Config())
    side = Side(specs=spec.resolve(models.sites(loaded.config)), dtype=dtype, kv=spec.kv)
    prompts, mask = encode_prompts(loaded.tokenizer, CALIBRATION_PROMPTS, width=CALIBRATION_WIDTH)
    calibration = calibrate.first(
        loaded.params, jnp.asarray(prompts), jnp.asarray(mask), config=loaded.config, side=side
    )
    published = publish(loaded.params, config=loaded.config, side=side, version=0, calibration=calibration)
    return Policy(
        published=published, config=loaded.config, side=side, tokenizer=loaded.tokenizer, recipe=recipe
    )


def sampling(values: flags.FlagValues, tokenizer: Tokenizer) -> SamplingConfig:
    """The sampling that the flags describe; ValueError naming the flag's value if it is out of range."""
    found: dict[str, Any] = {
        name: values[name].value for name in ("temperature", "max_new_tokens", "top_k", "top_p", "min_p")
    }
    return SamplingConfig(**found, stop_tokens=tokenizer.stop_ids, pad_token=tokenizer.pad_id)


def describe(policy: Policy) -> str:
    """One line about what answers: sites, bits and dtype."""
    bits = policy.published.bits_per_weight
    packed = f"{bits:.2f} bits a weight at its quantized sites" if bits == bits else "weights unquantized"
    return f"recipe {policy.recipe} (rollout side): {packed}, activations {policy.side.dtype}"
