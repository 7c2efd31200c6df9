"""Writing Hugging Face directories: they load again bit-equal, and appear whole or not at all."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from fp4rl_jax import interchange, models
from fp4rl_jax.interchange import CheckpointError

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
TINY = ("tiny_llama", "tiny_llama3", "tiny_qwen2", "tiny_qwen3", "tiny_qwen3_moe", "tiny_mixtral")


def _equal(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 40_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_a_saved_model_loads_again_bit_equal(name: str, dtype: str, max_shard_bytes: int, tmp_path) -> None:
    before = interchange.load(FIXTURES / name, dtype=dtype)
    folder = interchange.save_hf(
        before.params,
        tmp_path / "out",
        config=before.config,
        tokenizer=before.tokenizer,
        max_shard_bytes=max_shard_bytes,
    )
    after = interchange.load(folder, dtype=dtype)
    assert after.config == before.config
    _equal(after.params, before.params)
    assert after.tokenizer.stop_ids == before.tokenizer.stop_ids
    assert len(list(folder.glob("*.safetensors"))) > 1 or max_shard_bytes > 40_000


def test_a_saved_model_holds_the_same_tensors_as_the_original(tmp_path: Path) -> None:
    loaded = interchange.load(FIXTURES / "tiny_qwen3_moe", dtype="float32")
    folder = interchange.save_hf(
        loaded.params, tmp_path / "out", config=loaded.config, tokenizer=loaded.tokenizer
    )
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, FIXTURES / "tiny_qwen3_moe"))
    assert ours.keys() == theirs.keys() and len(ours) > 40
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_shard_never_passes_its_limit_and_the_index_adds_up(tmp_path: Path) -> None:
    loaded = interchange.load(FIXTURES / "tiny_llama", dtype="float32")
    folder = interchange.save_hf(
        loaded.params,
        tmp_path / "out",
        config=loaded.config,
        tokenizer=loaded.tokenizer,
        max_shard_bytes=50_000,
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert all(sum(a.nbytes for a in tensors.values()) <= 50_000 for tensors in files.values())
    assert (
        sum(a.nbytes for tensors in files.values() for a in tensors.values())
        == (index["metadata"]["total_size"])
    )


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    loaded = interchange.load(FIXTURES / "tiny_llama", dtype="float32")
    with pytest.raises(FileExistsError, match="exists; choose a new directory"):
        interchange.save_hf(loaded.params, tmp_path, config=loaded.config, tokenizer=loaded.tokenizer)


def test_leaves_that_do_not_fit_the_model_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    loaded = interchange.load(FIXTURES / "tiny_llama", dtype="float32")
    config = dataclasses.replace(loaded.config, num_kv_heads=4)
    cases = [
        (loaded.params, config, "'layers/attn/k' has shape .* expected"),
        ({**loaded.params, "extra": jnp.ones(1)}, loaded.config, "'extra' is not part of this model"),
        (
            {k: v for k, v in loaded.params.items() if k != "head"},
            loaded.config,
            "'head' is missing",
        ),
        (models.fuse(loaded.params), loaded.config, "leaf 'layers/attn/k' is missing"),
    ]
    for params, wanted, message in cases:
        with pytest.raises(CheckpointError, match=message):
            interchange.save_hf(params, tmp_path / "out", config=wanted, tokenizer=loaded.tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    loaded = interchange.load(FIXTURES / "tiny_llama", dtype="float32")

    def full(*_args, **_kwargs) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp4rl_jax.interchange.save.save_tokenizer", full)
    with pytest.raises(OSError, match="No space left"):
        interchange.save_hf(loaded.params, tmp_path / "out", config=loaded.config, tokenizer=loaded.tokenizer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.smollm2
def test_smollm2_survives_the_round_trip(tmp_path: Path) -> None:
    before = interchange.load(SMOLLM2, dtype="bfloat16")
    folder = interchange.save_hf(
        before.params, tmp_path / "out", config=before.config, tokenizer=before.tokenizer
    )
    after = interchange.load(folder, dtype="bfloat16")
    assert after.config == before.config
    _equal(after.params, before.params)
    string = "What is 12 + 345?  Two  spaces, naïve 🙂"
    assert after.tokenizer.encode(string) == before.tokenizer.encode(string)
    chat = [{"role": "user", "content": string}]
    assert after.tokenizer.encode_chat(chat) == before.tokenizer.encode_chat(chat)
