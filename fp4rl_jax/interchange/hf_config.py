"""`config.json` of a Hugging Face directory <-> `ModelConfig`, every field accounted for.

A field is read, checked to hold the one value that the code honours, or known to say nothing about
inference. Any other field is an error: a checkpoint is loaded as what it is, or not at all.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp4rl_jax.arrays import unknown_name
from fp4rl_jax.interchange.errors import CheckpointError
from fp4rl_jax.models import FAMILIES, ModelConfig, RopeScaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
#: Fields that `model_config` reads.
_READ = (
    "model_type architectures vocab_size num_hidden_layers hidden_size intermediate_size "
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps tie_word_embeddings rope_theta "
    "rope_scaling rope_parameters max_position_embeddings num_experts num_local_experts num_experts_per_tok "
    "moe_intermediate_size norm_topk_prob use_sliding_window sliding_window max_window_layers layer_types"
).split()
#: Fields that must hold one of these values, where they are present.
_HONOURED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "pretraining_tp": (1, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "router_jitter_noise": (0.0, None),
}
#: Fields that say nothing about inference (training, bookkeeping, token ids read by the tokenizer).
_NOTES = (
    "_name_or_path name_or_path _attn_implementation_autoset transformers_version torch_dtype dtype "
    "use_cache initializer_range bos_token_id eos_token_id pad_token_id output_router_logits "
    "router_aux_loss_coef is_llama_config transformers.js_config auto_map unsloth_version unsloth_fixed"
).split()
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Reads the fields of a `config.json`.

    Raises:
        CheckpointError: a field is missing, unknown, or asks for what the code does not do; the
            message names the field, its value and what was expected.
    """
    family = _need(fields, "model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"config.json: {unknown_name('model_type', str(family), FAMILIES)}")
    _check_fields(fields, family)
    heads, width = _count(fields, "num_attention_heads"), _count(fields, "hidden_size")
    sparse, mixtral = family in ("qwen3_moe", "mixtral"), family == "mixtral"
    theta, scaling = _rope(fields)
    return ModelConfig(
        family=family,
        vocab_size=_count(fields, "vocab_size"),
        num_layers=_count(fields, "num_hidden_layers"),
        d_model=width,
        num_heads=heads,
        num_kv_heads=_count(fields, "num_key_value_heads") if fields.get("num_key_value_heads") else heads,
        head_dim=_head_dim(fields, family),
        d_ff=0 if sparse else _count(fields, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_eps=float(_need(fields, "rms_norm_eps")),
        tie_embeddings=_or(fields, "tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        num_experts=_num_experts(fields) if sparse else 0,
        num_active=_count(fields, "num_experts_per_tok") if sparse else 0,
        d_expert=_count(fields, "intermediate_size" if mixtral else "moe_intermediate_size") if sparse else 0,
        norm_topk=_need(fields, "norm_topk_prob") if sparse and not mixtral else True,
        max_length=_count(fields, "max_position_embeddings"),
    )


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model: what `model_config` and transformers read back.

    Raises:
        CheckpointError: the released family cannot express this configuration; the message names
            the field.
    """
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": _scaling_fields(config.rope_scaling),
        "max_position_embeddings": config.max_length,
    }
    if config.family != "qwen2":
        fields["attention_bias"] = False
    if config.family == "qwen3_moe":
        fields |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_active,
            "moe_intermediate_size": config.d_expert,
            "norm_topk_prob": config.norm_topk,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if config.family == "mixtral":
        fields |= {
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.num_active,
            "intermediate_size": config.d_expert,
            "sliding_window": None,
        }
        del fields["attention_bias"]
    back = model_config(fields)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(config, field.name), getattr(back, field.name)
        if ours != theirs and not (field.name == "d_ff" and config.num_experts):
            raise CheckpointError(
                f"{field.name} = {ours} cannot be written: a {config.family} checkpoint means "
                f"{field.name} = {theirs}"
            )
    return fields


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise CheckpointError(f"config.json has no {name}, which this model type needs")
    return fields[name]


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = _need(fields, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name} = {value!r}, expected a whole number of at least 1")
    return value


def _or(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """The field, or what the released class means by its absence."""
    return default if fields.get(name) is None else fields[name]


def _num_experts(fields: Mapping[str, Any]) -> int:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""
    return _count(fields, "num_local_experts" if fields.get("num_local_experts") else "num_experts")


def _head_dim(fields: Mapping[str, Any], family: str) -> int:
    if family == "qwen3":  # its class default, 128, does not follow from the other fields
        return _count(fields, "head_dim")
    if fields.get("head_dim") is not None:
        return _count(fields, "head_dim")
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if width % heads:
        raise CheckpointError(f"config.json: hidden_size {width} is not a multiple of {heads} heads")
    return width // heads


def _check_fields(fields: Mapping[str, Any], family: str) -> None:
    known = (*_READ, *_HONOURED, *_NOTES)
    for name, value in fields.items():
        if name not in known:
            hint = unknown_name("field", name, known).args[0].split(" (known")[0]
            raise CheckpointError(f"config.json: {hint}, value {value!r}: the code does not honour it")
        if name in _HONOURED and value not in _HONOURED[name]:
            raise CheckpointError(
                f"config.json: {name} = {value!r} is not honoured, expected {_HONOURED[name][0]!r}"
            )
    wanted = _ARCHITECTURES[family]
    if fields.get("architectures") not in (None, [wanted]):
        raise CheckpointError(
            f"config.json: architectures = {fields['architectures']!r}, expected [{wanted!r}]"
        )
    _check_windows(fields, family)


def _check_windows(fields: Mapping[str, Any], family: str) -> None:
    if fields.get("use_sliding_window"):
        raise CheckpointError("config.json: use_sliding_window = True is not honoured, expected False")
    window = fields.get("sliding_window")
    if (
        family in ("llama", "mixtral") and window is not None
    ):  # the Qwen families use it only with use_sliding_window
        raise CheckpointError(f"config.json: sliding_window = {window} is not honoured, expected null")
    for index, kind in enumerate(fields.get("layer_types") or ()):
        if kind != "full_attention":
            raise CheckpointError(
                f"config.json: layer_types[{index}] = {kind!r} is not honoured, expected 'full_attention'"
            )


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    if fields.get("rope_parameters") and fields.get("rope_scaling"):
        raise CheckpointError("config.json has both rope_parameters and rope_scaling, expected one of them")
    rope = dict(fields.get(name) or {})
    theta = rope.pop("rope_theta", fields.get("rope_theta"))
    if fields.get("rope_theta", theta) != theta:
        raise CheckpointError(f"config.json: rope_theta = {fields['rope_theta']}, but {name} says {theta}")
    if theta is None:
        raise CheckpointError("config.json has no rope_theta, neither of its own nor in rope_parameters")
    kinds = {rope.pop(key) for key in ("rope_type", "type") if key in rope} or {"default"}
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise CheckpointError(f"config.json: {name}.partial_rotary_factor is not honoured, expected 1")
    if kinds not in ({"default"}, {"llama3"}):
        raise CheckpointError(
            f"config.json: {name} of type {'/'.join(sorted(map(str, kinds)))!r} is not honoured, expected "
            "'default' or 'llama3'"
        )
    wanted = _LLAMA3 if kinds == {"llama3"} else ()
    if set(rope) != set(wanted):
        raise CheckpointError(
            f"config.json: {name} of type {kinds.pop()!r} has the fields {sorted(rope)}, expected "
            f"{sorted(wanted)}"
        )
    if not wanted:
        return float(theta), None
    scaling = RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_length=int(rope["original_max_position_embeddings"]),
    )
    return float(theta), scaling


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = (
        scaling.factor,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_length,
    )
    return {"rope_type": "llama3", **dict(zip(_LLAMA3, values, strict=True))}
