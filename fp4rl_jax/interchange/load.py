"""Loading a model: a Hugging Face directory, a GGUF file, or a directory that holds one GGUF file."""

import dataclasses
from pathlib import Path

from fp4rl_jax.arrays import PyTree, check_name
from fp4rl_jax.interchange import gguf_model, hf_config
from fp4rl_jax.interchange.assemble import assemble, same_values
from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.gguf_file import GGUFFile
from fp4rl_jax.interchange.hf_directory import HFDirectory, read_json
from fp4rl_jax.interchange.naming import GGUF_NAMES, HF_NAMES, hf_names
from fp4rl_jax.interchange.sources import SOURCES
from fp4rl_jax.models import ModelConfig
from fp4rl_jax.text import Tokenizer, from_gguf_metadata
from fp4rl_jax.text import load_tokenizer as load_hf_tokenizer

#: Models that ship with the package, and how a path names one.
PACKAGED = Path(__file__).parents[1] / "packaged"
PREFIX = "packaged:"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A checkpoint in memory: the model's description, its master tree and its tokenizer."""

    config: ModelConfig
    params: PyTree
    tokenizer: Tokenizer


def load(path: str | Path, *, dtype: str, shardings: PyTree | None = None) -> Loaded:
    """Loads a checkpoint, tensor by tensor, into the stacked master tree.

    Args:
        path: a Hugging Face directory (config.json, safetensors, tokenizer.json), a GGUF file, a
            directory with exactly one GGUF file (as `fp4rl fetch` leaves), or `packaged:NAME`, a model
            that ships with the package.
        dtype: master dtype, "float32" or "bfloat16"; stored values are rounded to nearest even.
        shardings: where each leaf goes (`models.shardings`), or None for the default device.

    Returns:
        Configuration, parameters (jax arrays, layout of `models.describe`) and tokenizer. Host memory
        peaks at one copy of the model and one leaf.

    Raises:
        FileNotFoundError: nothing at `path`, or no tokenizer there.
        CheckpointError: a tensor is missing, unexpected, misshapen, truncated or of another dtype, or
            the configuration asks for what the code does not do; the message names it.
    """
    where = _locate(path)
    if where.suffix == ".gguf":
        file = GGUFFile(where)
        config, tokenizer = gguf_model.model_config(file), from_gguf_metadata(file.metadata)
        source = gguf_model.UnpermutedLlama(file, config) if config.family == "llama" else file
        names = GGUF_NAMES
    else:
        config, tokenizer = load_config(where), load_hf_tokenizer(where)
        source = HFDirectory(where)
        names = hf_names(config.family)
        _drop_tied_head(source, config)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} ids, the embedding {config.vocab_size} rows"
        )
    params = assemble(source, config, names=names, dtype=dtype, shardings=shardings)
    return Loaded(config=config, params=params, tokenizer=tokenizer)


def load_config(path: str | Path) -> ModelConfig:
    """The model's description alone, without reading its weights; arguments and errors as `load`."""
    where = _locate(path)
    if where.suffix == ".gguf":
        return gguf_model.model_config(GGUFFile(where))
    return hf_config.model_config(read_json(where / "config.json"))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer alone; arguments and errors as `load`."""
    where = _locate(path)
    return (
        from_gguf_metadata(GGUFFile(where).metadata) if where.suffix == ".gguf" else load_hf_tokenizer(where)
    )


def _locate(path: str | Path) -> Path:
    """The GGUF file or the Hugging Face directory that `path` means."""
    if str(path).startswith(PREFIX):
        name = str(path).removeprefix(PREFIX)
        return PACKAGED / check_name("packaged model", name, sorted(p.name for p in PACKAGED.iterdir()))
    where = Path(path)
    if not where.exists():
        hint = f"run `fp4rl fetch {where.name}`" if where.name in SOURCES else "check the path"
        raise FileNotFoundError(f"{where} does not exist: {hint}")
    if where.is_file():
        if where.suffix != ".gguf":
            raise CheckpointError(f"{where} is a file, expected a directory or a .gguf file")
        return where
    if (where / "config.json").is_file():
        return where
    found = sorted(where.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise CheckpointError(f"{where} has no config.json and not exactly one .gguf file (found: {names})")
    return found[0]


def _drop_tied_head(source: HFDirectory, config: ModelConfig) -> None:
    """A stored head beside tied embeddings must be the embedding, or the two disagree."""
    embed, head = HF_NAMES["embed"], HF_NAMES["head"]
    if not config.tie_embeddings or head not in source.tensors or embed not in source.tensors:
        return
    if not same_values(source, embed, head):
        raise CheckpointError(
            f"{source.path}: config.json says tie_word_embeddings = true, but {head!r} differs from {embed!r}"
        )
    source.tensors = {name: info for name, info in source.tensors.items() if name != head}
