"""The weights of a Hugging Face directory: one safetensors file, or shards and their index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.safetensors_file import SafetensorsFile
from fp4rl_jax.interchange.source import TensorInfo

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_RECOMPUTED = ".rotary_emb.inv_freq"  # a buffer that early llama checkpoints carry; rope_theta gives it


class HFDirectory:
    """All safetensors files of a directory as one checkpoint.

    Attributes:
        path: the directory.
        tensors: name -> `TensorInfo` over all files.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the headers of every file.

        Raises:
            CheckpointError: there are no weights, a shard is missing or damaged, or the index and
                the shards disagree; the message names the file or tensor.
        """
        self.path = Path(path)
        files = self._files()
        self._home: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._home:
                    raise CheckpointError(
                        f"{self.path}: tensor {name!r} is both in {self._home[name].path.name} and in "
                        f"{file.path.name}"
                    )
                self._home[name] = file
        self.tensors: Mapping[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._home.items() if not name.endswith(_RECOMPUTED)
        }

    def _files(self) -> list[SafetensorsFile]:
        index = self.path / INDEX
        if index.is_file():
            return self._shards(read_json(index).get("weight_map"))
        if (self.path / WEIGHTS).is_file():
            return [SafetensorsFile(self.path / WEIGHTS)]
        others = sorted(p.name for p in self.path.glob("*") if p.suffix in (".safetensors", ".bin", ".pth"))
        raise CheckpointError(
            f"{self.path} has neither {WEIGHTS} nor {INDEX} (weights found: {', '.join(others) or 'none'})"
        )

    def _shards(self, weight_map: Any) -> list[SafetensorsFile]:
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{self.path / INDEX} has no weight_map")
        files = {}
        for name in sorted(set(weight_map.values())):
            if not (self.path / name).is_file():
                raise CheckpointError(f"{self.path}: shard {name} is missing, {INDEX} lists it")
            files[name] = SafetensorsFile(self.path / name)
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensors:
                raise CheckpointError(f"{self.path}: {INDEX} puts {tensor!r} into {name}, which lacks it")
        return list(files.values())

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Copies one tensor into `out`, rounding to its dtype."""
        self._home[name].read_into(name, out)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file; CheckpointError naming it if it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected an object")
    return value
