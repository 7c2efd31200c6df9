"""Typed configuration: TOML files and overrides to frozen dataclasses, and back to plain values.

Knows dataclasses and plug-in folders, and nothing of what is configured. Read in this order:
`sources` (files and `--set` to nested mappings), `plugin` (a section typed by a plug-in's own `Config`),
`build` (mapping to dataclass, and back to what JSON and TOML can hold), `sides` (the recipe section),
`layers` (many sources to one mapping).
"""

from fp4rl_jax.configuring.build import build, checking, to_plain, validate
from fp4rl_jax.configuring.errors import ConfigError
from fp4rl_jax.configuring.layers import merge_layers
from fp4rl_jax.configuring.plugin import Plugin, plugin_section
from fp4rl_jax.configuring.sides import RecipeSection
from fp4rl_jax.configuring.sources import Word, merge, parse_override, read_file

__all__ = [
    "ConfigError",
    "Plugin",
    "RecipeSection",
    "Word",
    "build",
    "checking",
    "merge",
    "merge_layers",
    "parse_override",
    "plugin_section",
    "read_file",
    "to_plain",
    "validate",
]
