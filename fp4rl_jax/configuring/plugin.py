"""A configuration section that belongs to a plug-in: its name, and the plug-in file's own `Config`."""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

from fp4rl_jax import plugins

#: Key of a dataclass field's metadata that names the package whose plug-ins may fill the field.
PACKAGE = "plugin_package"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A chosen plug-in with its settings: `[algorithm] name = "grpo"` plus that file's knobs.

    Attributes:
        package: dotted name of the package that holds the plug-in's file.
        name: the file's name, which is the plug-in's name everywhere.
        config: an instance of the file's `Config`.
    """

    package: str
    name: str
    config: Any

    @property
    def module(self) -> ModuleType:
        """The plug-in's module: `section.module.prepare(..., section.config)`."""
        return plugins.load(importlib.import_module(self.package), self.name)


def plugin_section(package: str, *, default: str) -> Any:
    """A dataclass field that holds a `Plugin` of `package`; `default` is taken when none is named."""
    return dataclasses.field(
        default_factory=lambda: default_plugin(package, default),
        metadata={PACKAGE: package, "default_name": default},
    )


def default_plugin(package: str, name: str) -> Plugin:
    """The plug-in `name` of `package` with its published settings.

    Raises:
        ValueError: there is no such plug-in; the message gives the nearest name.
        TypeError: the plug-in's `Config` has a field without a default.
    """
    module = plugins.load(importlib.import_module(package), name)
    return Plugin(package, name, module.Config())
