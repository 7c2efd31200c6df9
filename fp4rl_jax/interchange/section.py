"""The `model` section of a configuration: a checkpoint, or a random model of a given shape."""

import dataclasses
from typing import Any

from fp4rl_jax.models import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Where the model comes from.

    Attributes:
        path: a Hugging Face directory, a GGUF file or a directory with one; None draws random
            weights of `shape` and reads text as bytes.
        shape: the random model; its vocabulary must hold the byte tokenizer's.
    """

    path: str | None = None
    shape: ModelConfig = ModelConfig()

    def validate(self, root: Any) -> None:
        """Refuses a shape beside a path: one of the two would be ignored."""
        if self.path is not None and self.shape != ModelConfig():
            raise ValueError(f"model.shape is set beside model.path = {self.path!r}: expected one of the two")
