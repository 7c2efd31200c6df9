"""A folder is a registry: the files of a package are its plug-ins, by file name.

Adding a format, recipe, algorithm, correction or task means adding one file; there is no list
to edit. Modules whose name starts with an underscore are helpers and not plug-ins.
"""

import importlib
import pkgutil
from types import ModuleType

from fp4rl_jax.arrays import check_name


def names(package: ModuleType) -> tuple[str, ...]:
    """The plug-in names of `package`, sorted: its public module files."""
    found = (info.name for info in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def load(package: ModuleType, name: str) -> ModuleType:
    """Imports the plug-in `name` of `package`.

    Raises:
        ValueError: there is no such file; the message gives the nearest name.
    """
    kind = package.__name__.rsplit(".", 1)[-1].rstrip("s")
    check_name(kind, name, names(package))
    return importlib.import_module(f"{package.__name__}.{name}")
