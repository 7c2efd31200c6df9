"""Functions with their config bound, equal by value, so that jit traces once per meaning."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Bound:
    """`fn(*args, config)` as a hashable callable.

    Attributes:
        fn: a module-level function whose last positional argument is its config.
        config: a frozen dataclass.
    """

    fn: Callable[..., Any]
    config: Any

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args, self.config)
