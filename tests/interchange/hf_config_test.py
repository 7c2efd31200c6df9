"""config.json: what is read, what is refused by name, and what is written back."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fp4rl_jax.interchange import CheckpointError
from fp4rl_jax.interchange.hf_config import config_fields, model_config
from fp4rl_jax.models import ModelConfig, RopeScaling

FIXTURES = Path(__file__).parent.parent / "fixtures"


def _fields(name: str = "tiny_llama") -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


#: As SmolLM2-135M-Instruct's and Qwen2.5-0.5B-Instruct's are written by transformers 4.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_files_of_transformers_4_are_read() -> None:
    smollm2, qwen2 = model_config(SMOLLM2), model_config(QWEN2)
    assert (smollm2.head_dim, smollm2.rope_theta, smollm2.num_kv_heads) == (64, 100000.0, 3)
    assert smollm2.tie_embeddings and not smollm2.qkv_bias
    assert (qwen2.head_dim, qwen2.rope_theta, qwen2.qkv_bias) == (64, 1e6, True)


def test_files_of_transformers_5_are_read() -> None:
    moe = model_config(_fields("tiny_qwen3_moe"))
    assert (moe.num_experts, moe.num_active, moe.d_expert, moe.norm_topk) == (6, 2, 16, True)
    assert (moe.qk_norm, moe.head_dim, moe.tie_embeddings) == (True, 16, False)
    assert model_config(_fields("tiny_llama3")).rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=16
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "unknown model_type 'mistral'"),
        ({"model_type": "qwen3moe"}, "did you mean 'qwen3_moe'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = .*'LlamaForCausalLM'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not honoured, expected 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not honoured, expected False"),
        ({"mlp_bias": True}, "mlp_bias = True is not honoured"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8.*expected None"),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not honoured"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\] = 'sliding_attention'"),
        (
            {"rope_scaling": {"type": "linear"}, "rope_theta": 1e4, "rope_parameters": None},
            "rope_scaling of type 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "default"}}, "both rope_parameters and rope_scaling"),
        ({"rope_theta": 5e5}, "rope_theta = 500000.0, but rope_parameters says 10000.0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "of type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4, "mscale": 1.0}}, r"fields \['mscale'\], expected \[\]"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": None}, "no rope_theta"),
        ({"hidden_sise": 3}, "unknown field 'hidden_sise': did you mean 'hidden_size'"),
        ({"logits_soft_cap": 30.0}, "unknown field 'logits_soft_cap'.* value 30.0"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_size": "32"}, "hidden_size = '32', expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0, expected a whole number of at least 1"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of 4 heads"),
    ],
)
def test_a_field_that_is_not_honoured_is_named(change: dict[str, Any], message: str) -> None:
    fields = _fields() | {"head_dim": None} | change
    with pytest.raises(CheckpointError, match=message):
        model_config(fields)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tiny_qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("tiny_qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("tiny_qwen3", {"head_dim": None}, "no head_dim"),
        ("tiny_qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("tiny_qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("tiny_qwen3_moe", {"num_local_experts": None}, "no num_experts"),
    ],
)
def test_family_fields_that_are_not_honoured_are_named(name: str, change: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        model_config(_fields(name) | change)


@pytest.mark.parametrize(
    "name", ["tiny_llama", "tiny_llama3", "tiny_qwen2", "tiny_qwen3", "tiny_qwen3_moe", "tiny_mixtral"]
)
def test_what_is_written_reads_back_equal(name: str) -> None:
    config = model_config(_fields(name))
    assert model_config(json.loads(json.dumps(config_fields(config)))) == config


@pytest.mark.parametrize("change", [{"qk_norm": True}, {"qkv_bias": True}, {"norm_topk": False}])
def test_what_the_family_cannot_express_is_named(change: dict[str, Any]) -> None:
    config = dataclasses.replace(ModelConfig(family="llama"), **change)
    with pytest.raises(CheckpointError, match=f"{next(iter(change))} = .* cannot be written: a llama"):
        config_fields(config)
