"""The root configuration: composes the sections that live beside the code they configure.

`load` merges files and overrides from left to right (later wins), builds, and validates once, before
jax touches a device. Nothing below rank 9 sees the root: the loop takes its parts.
"""

import dataclasses
import json
from collections.abc import Sequence
from functools import reduce
from typing import Any

from absl import logging

from fp4rl_jax.configuring import (
    ConfigError,
    Plugin,
    RecipeSection,
    build,
    checking,
    merge,
    merge_layers,
    parse_override,
    plugin_section,
    read_file,
    to_plain,
)
from fp4rl_jax.configuring import validate as validate_sections
from fp4rl_jax.data.supervised import SftConfig
from fp4rl_jax.loop import engine_gap
from fp4rl_jax.loop.config import EvalConfig, LoopConfig
from fp4rl_jax.loop.engine_gap import EngineGap
from fp4rl_jax.models.config import ModelConfig, MoeConfig, sites
from fp4rl_jax.objectives.triage import TriageConfig
from fp4rl_jax.ops.config import OpsConfig
from fp4rl_jax.parallel.mesh import MeshConfig
from fp4rl_jax.rollout.config import RolloutConfig
from fp4rl_jax.runs.config import RunConfig
from fp4rl_jax.runs.directory import flatten
from fp4rl_jax.trainer.config import TrainerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The policy to start from.

    Attributes:
        path: a Hugging Face folder, a GGUF file or `packaged:NAME`; none starts from random parameters.
        shape: the shape of those; refused beside a path, which brings its own.
    """

    path: str | None = None
    shape: ModelConfig = ModelConfig()

    def validate(self, root: Any) -> None:
        """Refuses a shape beside a path: one of the two would not be honoured."""
        if self.path is not None and self.shape != ModelConfig():
            raise ValueError(
                f"path = {self.path!r} brings its own shape; [model.shape] would not be honoured"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made of; frozen, hashable, equal by value.

    Attributes:
        engine_gap: by what the two sides' engines differ; see `loop.engine_gap`.
        The rest are sections, each described where it is defined.
    """

    engine_gap: EngineGap = "none"
    run: RunConfig = RunConfig()
    model: ModelSection = ModelSection()
    moe: MoeConfig = MoeConfig()
    recipe: RecipeSection = dataclasses.field(default_factory=RecipeSection)
    algorithm: Plugin = plugin_section("fp4rl_jax.algorithms", default="grpo")
    correction: Plugin = plugin_section("fp4rl_jax.corrections", default="tis")
    triage: TriageConfig = TriageConfig()
    task: Plugin = plugin_section("fp4rl_jax.tasks", default="arithmetic")
    sft: SftConfig = SftConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    loop: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    ops: OpsConfig = OpsConfig()
    mesh: MeshConfig = MeshConfig()


def load(files: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
    """Builds and validates the configuration of `files` (TOML, or a run's config.json) and `overrides`.

    Args:
        files: paths, merged left to right. A section whose plug-in a later one changes begins anew,
            with a warning that names what is dropped.
        overrides: `key.path=value` strings, merged after the files; together they are one source.

    Raises:
        ConfigError: a file that cannot be read, an unknown key or name (with the nearest one), a value
            of the wrong type (with its dotted path), or a configuration that cannot work.
    """
    words = reduce(merge, map(parse_override, overrides), {})
    values, notices = merge_layers(Config, [*map(read_file, files), words])
    for line in notices:
        logging.warning("%s", line)
    config = engine_gap.resolved(build(Config, values), values)
    validate(config)
    return config


def sections(files: Sequence[str] = (), overrides: Sequence[str] = ()) -> set[str]:
    """The sections in which `files` and `overrides` set anything; errors as `load`."""
    return {key for values in (*map(read_file, files), *map(parse_override, overrides)) for key in values}


def validate(config: Config) -> None:
    """Refuses a configuration that cannot work, before any device is used.

    Each section's dataclass checks itself against the whole (`validate(root)`), the algorithm the group
    size, and a recipe's patterns are held against the sites of a model whose shape is given here.

    Raises:
        ConfigError: names the dotted path and the numbers that do not fit together.
    """
    validate_sections(config, root=config)
    with checking(""):
        engine_gap.check(config)
    plugin = config.algorithm
    with checking("algorithm"):
        plugin.module.validate(plugin.config, group_size=config.loop.group_size)
    if config.model.path is None:
        with checking(""):
            config.moe.require(config.model.shape)
        with checking("recipe"):
            for side, plugin in (("trainer", config.recipe.trainer), ("rollout", config.recipe.rollout)):
                getattr(plugin.module, side)(plugin.config).resolve(sites(config.model.shape))


def dump(config: Config) -> str:
    """The resolved configuration as JSON: what `--dry_run` prints and a run saves as `config.json`.

    Exact: `load([file holding dump(config)]) == config`.
    """
    return json.dumps(as_dict(config), indent=2) + "\n"


def as_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as plain values; what `dump` writes."""
    return to_plain(config)


def unset(config: Config) -> dict[str, Any]:
    """By dotted key, what `as_dict(config)` would hold with the same plug-ins and nothing else set."""
    flat = flatten(as_dict(config))
    names = {key: value for key, value in flat.items() if key.endswith(".name") and key != "run.name"}
    words = [parse_override(f"{key}={name}") for key, name in names.items()]
    plain = flatten(as_dict(build(Config, reduce(merge, words, {}))))

    def shared(key: str) -> str:  # two sides that are equal are written once
        return key.replace("recipe.trainer.", "recipe.").replace("recipe.rollout.", "recipe.")

    return {key: plain.get(key, plain.get(shared(key))) for key in flat}


__all__ = ["Config", "ConfigError", "as_dict", "dump", "load", "sections", "unset", "validate"]
