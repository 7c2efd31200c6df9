"""Hugging Face directories: values, dtypes, shards, and errors that name the tensor."""

import json
import shutil
import time
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fp4rl_jax import interchange, models
from fp4rl_jax.interchange import CheckpointError
from fp4rl_jax.interchange.naming import hf_names, leaf_paths, pieces

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
TINY = ("tiny_llama", "tiny_llama3", "tiny_qwen2", "tiny_qwen3", "tiny_qwen3_moe", "tiny_mixtral")


def _stored(folder: Path) -> dict[str, np.ndarray]:
    return {name: a for file in folder.glob("*.safetensors") for name, a in load_file(file).items()}


def _copy(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def _rewrite(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces, adds or (None) drops tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({n: a for n, a in tensors.items() if a is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("name", TINY)
def test_every_stored_value_lands_in_its_place(name: str) -> None:
    loaded = interchange.load(FIXTURES / name, dtype="float32")
    stored = _stored(FIXTURES / name)
    used = set()
    leaves = dict(leaf_paths(loaded.params))
    for path, leaf in leaf_paths(models.describe(loaded.config)):
        for piece in pieces(path, leaf, names=hf_names(loaded.config.family)):
            value = np.asarray(leaves[path])[piece.index]
            np.testing.assert_array_equal(value, stored[piece.name].astype(np.float32))
            used.add(piece.name)
    assert used == set(stored)
    assert models.num_parameters(loaded.config) == sum(a.size for a in stored.values())


def test_master_dtype_rounds_to_nearest_even() -> None:
    whole = interchange.load(FIXTURES / "tiny_llama", dtype="float32").params
    half = interchange.load(FIXTURES / "tiny_llama", dtype="bfloat16").params
    for (path, a), (_, b) in zip(leaf_paths(whole), leaf_paths(half), strict=True):
        assert b.dtype == jnp.bfloat16, path
        np.testing.assert_array_equal(a.astype(jnp.bfloat16), b)


def test_leaves_go_where_their_sharding_says() -> None:
    config = interchange.load_config(FIXTURES / "tiny_llama")
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    wanted = jax.tree.map(lambda leaf: rows if leaf.shape[0] % 2 else split, models.describe(config))
    loaded = interchange.load(FIXTURES / "tiny_llama", dtype="float32", shardings=wanted)
    assert loaded.params["embed"].sharding == split
    assert loaded.params["embed"].addressable_shards[0].data.shape == (160, 32)
    alone = interchange.load(FIXTURES / "tiny_llama", dtype="float32")
    np.testing.assert_array_equal(loaded.params["embed"], alone.params["embed"])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    _rewrite(folder, **{"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(
        CheckpointError, match="'model.norm.weight', 'model.layers.1.mlp.up_proj.weight' are missing"
    ):
        interchange.load(folder, dtype="float32")


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    _rewrite(folder, **{"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)})
    with pytest.raises(CheckpointError, match=r"q_proj.bias' is in the file, but the configuration has no"):
        interchange.load(folder, dtype="float32")


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    _rewrite(folder, **{"model.layers.0.self_attn.k_proj.weight": np.zeros((32, 16), np.float32)})
    with pytest.raises(CheckpointError, match=r"k_proj.weight' has shape \[32, 16\], expected \[16, 32\]"):
        interchange.load(folder, dtype="float32")


def test_a_dtype_that_is_not_a_float_is_named(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    _rewrite(folder, **{"model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(CheckpointError, match="'model.norm.weight' has dtype I8, expected one of F32, BF16"):
        interchange.load(folder, dtype="float32")


def test_float16_tensors_are_read(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    values = np.linspace(-2, 2, 32, dtype=np.float16)
    _rewrite(folder, **{"model.norm.weight": values})
    np.testing.assert_array_equal(
        interchange.load(folder, dtype="float32").params["final_norm"], values.astype(np.float32)
    )


@pytest.mark.parametrize("lost", [1, 5_000, 150_000])
def test_a_truncated_file_names_the_tensor_it_loses(tmp_path: Path, lost: int) -> None:
    folder = _copy("tiny_llama", tmp_path)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(size - lost)
    with pytest.raises(CheckpointError, match=rf"truncated: tensor '.*' needs bytes .* has {size - lost}"):
        interchange.load(folder, dtype="float32")


def test_a_truncated_header_is_an_error(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        interchange.load(folder, dtype="float32")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[1]", "not a mapping"),
        (b'{"a": 1', "header is damaged: "),
        (b'{"a": 1}', "damaged at tensor 'a': 1, expected dtype, shape"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "damaged at tensor 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "damaged at tensor 'a'"),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}', "'a' has 4 bytes, expected 12"),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: bytes, message: str) -> None:
    folder = _copy("tiny_llama", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(CheckpointError, match=message):
        interchange.load(folder, dtype="float32")


def test_host_memory_peaks_at_one_leaf_beside_the_model(tmp_path: Path) -> None:
    """numpy's allocations are the staging; the finished leaves are jax's."""
    tokenizer = interchange.load_tokenizer(FIXTURES / "tiny_llama")
    config = models.ModelConfig(vocab_size=320, num_layers=8, d_model=256, d_ff=512, head_dim=64)
    params = models.init_params(config, jax.random.key(0))
    folder = interchange.save_hf(params, tmp_path / "m", config=config, tokenizer=tokenizer)
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert largest == 4 * 8 * 512 * 256
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > 4 * largest
    tracemalloc.start()
    interchange.load(folder, dtype="float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest < peak < 1.3 * largest


@pytest.mark.smollm2
def test_smollm2_loads_in_under_six_seconds() -> None:
    """Processor time, which bounds the wall clock of an idle machine from above."""
    start = time.process_time()
    loaded = interchange.load(SMOLLM2, dtype="float32")
    spent = time.process_time() - start
    assert models.num_parameters(loaded.config) == 134_515_008
    print(f"SmolLM2 loads in {spent:.2f} s of processor time")
    assert spent < 6


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _copy("tiny_qwen2", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard model-00002-of-00003.safetensors is missing"):
        interchange.load(folder, dtype="float32")


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    folder = _copy("tiny_qwen2", tmp_path)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="puts 'model.norm.weight' into model-00001-of-00003"):
        interchange.load(folder, dtype="float32")


def test_a_head_beside_tied_embeddings_must_equal_them(tmp_path: Path) -> None:
    folder = _copy("tiny_llama3", tmp_path)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite(folder, **{"lm_head.weight": embed})
    np.testing.assert_array_equal(interchange.load(folder, dtype="float32").params["embed"], embed)
    _rewrite(folder, **{"lm_head.weight": embed + 1})
    with pytest.raises(CheckpointError, match="tie_word_embeddings = true, but 'lm_head.weight' differs"):
        interchange.load(folder, dtype="float32")


def test_an_untied_model_without_a_head_is_an_error(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    _rewrite(folder, **{"lm_head.weight": None})
    with pytest.raises(CheckpointError, match="'lm_head.weight' is missing"):
        interchange.load(folder, dtype="float32")


def test_a_rotary_buffer_of_old_checkpoints_is_passed_over(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    _rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)})
    assert interchange.load(folder, dtype="float32").config.num_layers == 2


def test_a_tokenizer_larger_than_the_embedding_is_an_error(tmp_path: Path) -> None:
    folder = _copy("tiny_llama", tmp_path)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    token = dict(state["added_tokens"][0], id=320, content="<|more|>")
    path.write_text(json.dumps(state | {"added_tokens": [*state["added_tokens"], token]}))
    with pytest.raises(CheckpointError, match="tokenizer has 321 ids, the embedding 320 rows"):
        interchange.load(folder, dtype="float32")


def test_paths_that_hold_no_model_say_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: check the path"):
        interchange.load(tmp_path / "nowhere", dtype="float32")
    with pytest.raises(FileNotFoundError, match="run `fp4rl fetch smollm2`"):
        interchange.load(tmp_path / "smollm2", dtype="float32")
    with pytest.raises(CheckpointError, match="no config.json and not exactly one .gguf"):
        interchange.load(tmp_path, dtype="float32")
    folder = _copy("tiny_llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors .*found: pytorch_model.bin"):
        interchange.load(folder, dtype="float32")
