"""Checkpoints of other systems, read and written: Hugging Face directories and GGUF files."""

from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.interchange.hf_config import config_fields
from fp4rl_jax.interchange.load import Loaded, load, load_config, load_tokenizer
from fp4rl_jax.interchange.save import save_hf

__all__ = ["CheckpointError", "Loaded", "config_fields", "load", "load_config", "load_tokenizer", "save_hf"]
