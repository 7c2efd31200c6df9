"""GGUF files: headers, block types, llama's row order, and errors that name the key or tensor.

The files are written here with the `gguf` package from the tiny Hugging Face fixtures.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf import quants

from fp4rl_jax import interchange, text
from fp4rl_jax.interchange import CheckpointError
from fp4rl_jax.interchange.gguf_file import GGUFFile
from fp4rl_jax.interchange.naming import GGUF_NAMES, leaf_paths

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
TYPES = gguf.GGMLQuantizationType


def _metadata(loaded: interchange.Loaded) -> dict[str, Any]:
    config = loaded.config
    fields = {
        "block_count": config.num_layers,
        "context_length": config.max_length,
        "embedding_length": config.d_model,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "rope.freq_base": config.rope_theta,
        "feed_forward_length": config.d_ff or 64,
    }
    if config.num_experts:
        fields |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_active,
            "expert_feed_forward_length": config.d_expert,
        }
    architecture = ARCHITECTURES[config.family]
    return {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in fields.items()}


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rows -> the pairs that GGUF keeps for llama."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _tensors(loaded: interchange.Loaded) -> dict[str, np.ndarray]:
    config, tensors = loaded.config, {}
    for path, leaf in leaf_paths(loaded.params):
        stacked = np.asarray(leaf)
        name = GGUF_NAMES[path]
        heads = {"layers/attn/q": config.num_heads, "layers/attn/k": config.num_kv_heads}.get(path)
        for layer in range(config.num_layers if "{layer}" in name else 1):
            value = stacked[layer] if "{layer}" in name else stacked
            if heads and config.family == "llama":
                value = _permuted(value, heads)
            tensors[name.format(layer=layer)] = value
    return tensors


def _write(
    path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kind: TYPES = TYPES.F32
) -> Path:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    for name, value in tensors.items():
        stored = kind if value.ndim > 1 else TYPES.F32
        raw = quants.quantize(value, stored)
        writer.add_tensor(name, raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _vocabulary() -> dict[str, Any]:
    case = json.loads((FIXTURES / "text.json").read_text("utf-8"))["splitters"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": case["vocab"],
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in case["vocab"]],
        "tokenizer.ggml.merges": case["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


@pytest.fixture
def tiny() -> interchange.Loaded:
    return interchange.load(FIXTURES / "tiny_llama", dtype="float32")


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_qwen3_moe"])
def test_gguf_gives_the_same_model_as_the_hugging_face_directory(name: str, tmp_path: Path) -> None:
    reference = interchange.load(FIXTURES / name, dtype="float32")
    path = _write(tmp_path / "m.gguf", _metadata(reference) | _vocabulary(), _tensors(reference))
    loaded = interchange.load(path, dtype="float32")
    assert loaded.config == reference.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, reference.params)
    assert loaded.tokenizer.encode("the dog 12") == reference.tokenizer.encode("the dog 12")
    assert loaded.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "x"


@pytest.mark.parametrize("kind", [TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_types_equal_the_packages_dequantization(kind: TYPES, dtype: str, tmp_path: Path, rng) -> None:
    values = {"a": rng.normal(size=(7, 96)).astype(np.float32), "b": np.zeros((3, 32), np.float32)}
    file = GGUFFile(_write(tmp_path / "m.gguf", {"general.architecture": "llama"}, values, kind))
    for name, value in values.items():
        reference = quants.dequantize(quants.quantize(value, kind), kind)
        out = np.empty(value.shape, jax.numpy.dtype(dtype))
        file.read_into(name, out)
        np.testing.assert_array_equal(out, reference.astype(out.dtype))
        assert file.tensors[name].dtype == kind.name


def test_the_header_equals_the_packages_reader(tiny: interchange.Loaded, tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", _metadata(tiny) | _vocabulary(), _tensors(tiny), TYPES.Q8_0)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    shapes = {t.name: (tuple(t.shape[::-1]), t.tensor_type.name) for t in theirs.tensors}
    assert {n: (i.shape, i.dtype) for n, i in ours.tensors.items()} == shapes


@pytest.mark.slow  # the package's reader alone takes most of it
@pytest.mark.smollm2
def test_smollm2_is_read_bit_for_bit_as_the_package_reads_it() -> None:
    path = next(SMOLLM2.glob("*.gguf"))
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert len(theirs.tensors) == len(ours.tensors) == 272
    for tensor in theirs.tensors:
        out = np.empty(ours.tensors[tensor.name].shape, np.float32)
        ours.read_into(tensor.name, out)
        np.testing.assert_array_equal(out, quants.dequantize(tensor.data, tensor.tensor_type))
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if k in ours.metadata}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "unknown general.architecture 'gemma3'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' is not honoured"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor = 4.0 is not honoured"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window = 4096"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not honoured, expected 0"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4 is not honoured, expected 8"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length = 16"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv differs by layer: \[2, 1\]"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"split.count": 3}, "is one of 3 parts of a split file"),
        ({"tokenizer.ggml.pre": "deepseek"}, "unknown tokenizer.ggml.pre 'deepseek'"),
    ],
)
def test_a_key_that_is_not_honoured_is_named(tiny, tmp_path: Path, change: dict, message: str) -> None:
    metadata = {k: v for k, v in (_metadata(tiny) | _vocabulary() | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        interchange.load(_write(tmp_path / "m.gguf", metadata, _tensors(tiny)), dtype="float32")


def test_missing_extra_and_misshapen_tensors_are_named(tiny, tmp_path: Path) -> None:
    metadata, tensors = _metadata(tiny) | _vocabulary(), _tensors(tiny)
    cases = {
        "'blk.1.ffn_up.weight' is missing": {"blk.1.ffn_up.weight": None},
        "'rope_freqs.weight' is in the file, but": {"rope_freqs.weight": np.ones(4, np.float32)},
        r"'blk.0.attn_k.weight' has shape \[8, 32\], expected \[16, 32\]": {
            "blk.0.attn_k.weight": np.ones((8, 32), np.float32)
        },
    }
    for number, (message, change) in enumerate(cases.items()):
        changed = {n: v for n, v in (tensors | change).items() if v is not None}
        path = _write(tmp_path / f"{number}.gguf", metadata, changed)
        with pytest.raises(CheckpointError, match=message):
            interchange.load(path, dtype="float32")


@pytest.mark.parametrize("keep", [0, 3, 20, 5_000, -1])
def test_a_truncated_file_is_an_error_wherever_it_ends(tiny, tmp_path: Path, keep: int) -> None:
    path = _write(tmp_path / "m.gguf", _metadata(tiny) | _vocabulary(), _tensors(tiny))
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    message = {0: "is empty", -1: r"truncated: tensor '\S+' needs bytes"}.get(keep, "truncated")
    with pytest.raises(CheckpointError, match=message):
        interchange.load(path, dtype="float32")


def test_no_damage_of_the_header_escapes_as_another_error(tiny, tmp_path: Path, rng) -> None:
    path = _write(tmp_path / "m.gguf", _metadata(tiny) | _vocabulary(), _tensors(tiny))
    whole, header = path.read_bytes(), path.stat().st_size - sum(a.nbytes for a in _tensors(tiny).values())
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for offset in rng.integers(0, header, size=rng.integers(1, 4)):
            damaged[offset] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            GGUFFile(path)
        except CheckpointError:
            refused += 1
    assert 30 < refused < 300


def test_what_is_not_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(CheckpointError, match="starts with b'GGML', expected b'GGUF'"):
        interchange.load(path, dtype="float32")
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 9"):
        interchange.load(path, dtype="float32")


def test_a_block_type_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.zeros((2, 292), np.uint8), raw_dtype=TYPES.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'w' is stored as Q8_K, which the gguf package cannot"):
        GGUFFile(path).read_into("w", np.empty((2, 256), np.float32))


def test_the_tokenizer_alone_can_be_read(tiny, tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", _metadata(tiny) | _vocabulary(), {})
    assert isinstance(interchange.load_tokenizer(tmp_path), text.Tokenizer)
    assert interchange.load_tokenizer(path).stop_ids == (2,)
