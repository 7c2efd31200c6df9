"""GGUF metadata -> `ModelConfig`, and the row order in which GGUF keeps llama's q and k."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.gguf_file import GGUFFile
from fp4rl_jax.interchange.source import TensorInfo
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.models.config import Family

_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
_READ = (
    "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type vocab_size "
    "expert_count expert_used_count expert_feed_forward_length"
).split()


def model_config(file: GGUFFile) -> ModelConfig:
    """Reads the model that a GGUF file describes.

    Raises:
        CheckpointError: a key is missing, unknown, or asks for what the code does not do; the
            message names the key, its value and what was expected.
    """
    parts = file.metadata.get("split.count", 1)
    if parts > 1:
        raise CheckpointError(f"{file.path} is one of {parts} parts of a split file: merge them first")
    fields = _Fields(file)
    heads, width = fields.need("attention.head_count"), fields.need("embedding_length")
    head_dim = fields.get("attention.key_length", width // heads)
    fields.expect("attention.value_length", head_dim)
    fields.expect("rope.dimension_count", head_dim)
    fields.expect("rope.scaling.type", "none")
    sparse = fields.family == "qwen3_moe"
    if not sparse:
        fields.expect("expert_count", 0)
    embedding = file.tensors.get("token_embd.weight", TensorInfo((0, 0), "none"))
    return ModelConfig(
        family=fields.family,
        vocab_size=fields.get("vocab_size", embedding.shape[0]),
        num_layers=fields.need("block_count"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=fields.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        d_ff=0 if sparse else fields.need("feed_forward_length"),
        rope_theta=_decimal(fields.need("rope.freq_base")),
        rms_eps=_decimal(fields.need("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=fields.family == "qwen2",
        qk_norm=fields.family in ("qwen3", "qwen3_moe"),
        num_experts=fields.need("expert_count") if sparse else 0,
        num_active=fields.need("expert_used_count") if sparse else 0,
        d_expert=fields.need("expert_feed_forward_length") if sparse else 0,
        norm_topk=True,  # GGUF has no such key; the format's runtimes always divide by the sum
        max_length=fields.need("context_length"),
    )


class _Fields:
    """The keys of one architecture ("llama.block_count", ...), checked and without their prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        architecture = str(file.metadata.get("general.architecture"))
        if architecture not in _FAMILIES:
            raise CheckpointError(
                f"{self.path}: {unknown_name('general.architecture', architecture, _FAMILIES)}"
            )
        self.family: Family = _FAMILIES[architecture]
        self.prefix = f"{architecture}."
        self.values: Mapping[str, Any] = {
            key.removeprefix(self.prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self.prefix)
        }
        for key, value in self.values.items():
            if key not in _READ:
                raise CheckpointError(f"{self.path}: {self.prefix}{key} = {value!r} is not honoured")
            if isinstance(value, list):
                raise CheckpointError(f"{self.path}: {self.prefix}{key} differs by layer: {value}")

    def need(self, key: str) -> Any:
        if key not in self.values:
            raise CheckpointError(f"{self.path} has no {self.prefix}{key}")
        return self.values[key]

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def expect(self, key: str, wanted: Any) -> None:
        if self.get(key, wanted) != wanted:
            raise CheckpointError(
                f"{self.path}: {self.prefix}{key} = {self.values[key]!r} is not honoured, expected {wanted!r}"
            )


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05 for 9.999999747378752e-06. The same number in float32."""
    return float(str(np.float32(value)))


class UnpermutedLlama:
    """A GGUF file of a llama, its q and k rows put back into half-split (rotate-half) order.

    GGUF keeps each head's rows as (i, i + C/2) pairs side by side: [H, C/2, 2, D]. Here, as in
    Hugging Face checkpoints, the first halves come first: [H, 2, C/2, D].
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        self._head_dim = config.head_dim

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._file.tensors

    def read_into(self, name: str, out: np.ndarray) -> None:
        """As `GGUFFile.read_into`, with the rows of q and k in half-split order."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            self._file.read_into(name, out)
            return
        stored = np.empty_like(out)
        self._file.read_into(name, stored)
        pairs = stored.reshape(heads, self._head_dim // 2, 2, -1)
        out.reshape(heads, 2, self._head_dim // 2, -1)[...] = pairs.swapaxes(1, 2)
