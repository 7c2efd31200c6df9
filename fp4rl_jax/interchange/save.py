"""Writing a model as a Hugging Face directory that transformers, vLLM and `load` read."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fp4rl_jax.arrays import PyTree
from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.hf_config import config_fields
from fp4rl_jax.interchange.hf_directory import INDEX, WEIGHTS
from fp4rl_jax.interchange.naming import hf_names, leaf_paths, pieces
from fp4rl_jax.models import ModelConfig, describe
from fp4rl_jax.text import Tokenizer, save_tokenizer


def save_hf(
    params: PyTree,
    directory: str | Path,
    *,
    config: ModelConfig,
    tokenizer: Tokenizer,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes config.json, safetensors and tokenizer files; the directory appears complete or not at all.

    Args:
        params: master tree of `config`; leaves keep their dtype (float32 or bfloat16).
        directory: where to; must not exist yet.
        config: the model.
        tokenizer: the model's tokenizer.
        max_shard_bytes: a new safetensors file begins before this size is passed.

    Returns:
        The directory.

    Raises:
        FileExistsError: `directory` exists.
        CheckpointError: a leaf is missing, unexpected or misshapen, or the released family cannot
            express the configuration.

    Exact: `load` of the result returns the same bits.
    """
    target = Path(directory)
    if target.exists():
        raise FileExistsError(f"{target} exists; choose a new directory")
    fields = config_fields(config) | _token_ids(tokenizer)
    leaves = _checked(params, config)
    fields["torch_dtype"] = str(leaves["embed"].dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        _write_weights(partial, leaves, config, max_shard_bytes)
        _write_json(partial / "config.json", fields)
        save_tokenizer(tokenizer, partial)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def _checked(params: PyTree, config: ModelConfig) -> dict[str, Any]:
    leaves, wanted = dict(leaf_paths(params)), dict(leaf_paths(describe(config)))
    odd = sorted(set(leaves) ^ set(wanted))
    if odd:
        word = "missing" if odd[0] in wanted else "not part of this model"
        raise CheckpointError(f"parameter leaf {odd[0]!r} is {word}")
    for path, leaf in wanted.items():
        if leaves[path].shape != leaf.shape:
            raise CheckpointError(
                f"parameter leaf {path!r} has shape {leaves[path].shape}, expected {leaf.shape}"
            )
    return leaves


def _write_weights(folder: Path, leaves: dict[str, Any], config: ModelConfig, max_shard_bytes: int) -> None:
    shards = list(_shards(leaves, config, max_shard_bytes))
    if len(shards) == 1:
        _write_shard(folder / WEIGHTS, shards[0], leaves)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard, leaves)
        weight_map |= dict.fromkeys((tensor for _, tensor, _ in shard), name)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


_Entry = tuple[str, str, tuple[int, ...]]  # leaf path, tensor name, index into the leaf


def _shards(leaves: dict[str, Any], config: ModelConfig, max_bytes: int) -> Iterator[list[_Entry]]:
    shard: list[_Entry] = []
    size = 0
    for path, leaf in leaf_paths(describe(config)):
        for piece in pieces(path, leaf, names=hf_names(config.family)):
            more = int(np.prod(piece.shape)) * leaves[path].dtype.itemsize
            if shard and size + more > max_bytes:
                yield shard
                shard, size = [], 0
            shard.append((path, piece.name, piece.index))
            size += more
    yield shard


def _write_shard(path: Path, shard: list[_Entry], leaves: dict[str, Any]) -> None:
    """Each leaf comes to the host once per shard; tensors are views of it."""
    hosts = {leaf: np.asarray(leaves[leaf]) for leaf in dict.fromkeys(leaf for leaf, _, _ in shard)}
    tensors = {name: np.ascontiguousarray(hosts[leaf][index]) for leaf, name, index in shard}
    save_file(tensors, path, metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
