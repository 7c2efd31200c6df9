"""An independent decoder in numpy float64, one unpadded sequence at a time, and tiny models for it."""

from typing import Any

import numpy as np

from fp4rl_jax.models import ModelConfig

#: One tiny model of every family; head_dim * num_heads differs from d_model on purpose.
TINY = {
    "llama": ModelConfig(
        family="llama",
        vocab_size=61,
        num_layers=3,
        d_model=32,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        d_ff=48,
    ),
    "qwen2": ModelConfig(
        family="qwen2",
        vocab_size=61,
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=48,
        rms_eps=1e-6,
        tie_embeddings=False,
        qkv_bias=True,
    ),
    "qwen3": ModelConfig(
        family="qwen3",
        vocab_size=61,
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        d_ff=48,
        rms_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
    ),
    "qwen3_moe": ModelConfig(
        family="qwen3_moe",
        vocab_size=61,
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_eps=1e-6,
        tie_embeddings=False,
        qk_norm=True,
        num_experts=5,
        num_active=2,
        d_expert=16,
    ),
}


def random_params(config: ModelConfig, rng: np.random.Generator) -> dict[str, Any]:
    """A float32 master tree in which every part matters: large weights, norms away from 1, biases."""
    d, c, layers = config.d_model, config.head_dim, config.num_layers
    query, keyval = config.num_heads * c, config.num_kv_heads * c

    def weight(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm(*shape: int) -> np.ndarray:
        return (1 + 0.2 * rng.normal(size=shape)).astype(np.float32)

    attn = {"q": weight(layers, query, d), "k": weight(layers, keyval, d), "v": weight(layers, keyval, d)}
    attn["out"] = weight(layers, d, query)
    if config.qkv_bias:
        for name, size in (("q_bias", query), ("k_bias", keyval), ("v_bias", keyval)):
            attn[name] = weight(layers, size)
    if config.qk_norm:
        attn |= {"q_norm": norm(layers, c), "k_norm": norm(layers, c)}
    stack: dict[str, Any] = {"attn_norm": norm(layers, d), "attn": attn, "mlp_norm": norm(layers, d)}
    if config.num_experts:
        e, f = config.num_experts, config.d_expert
        stack["moe"] = {"router": weight(layers, e, d), "gate": weight(layers, e, f, d)}
        stack["moe"] |= {"up": weight(layers, e, f, d), "down": weight(layers, e, d, f)}
    else:
        f = config.d_ff
        stack["mlp"] = {
            "gate": weight(layers, f, d),
            "up": weight(layers, f, d),
            "down": weight(layers, d, f),
        }
    tree = {"embed": weight(config.vocab_size, d) * 4, "layers": stack, "final_norm": norm(d)}
    if not config.tie_embeddings:
        tree["head"] = weight(config.vocab_size, d) * 4
    return tree


def sequence_logits(params: dict[str, Any], tokens: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Logits [T, V] float64 of one sequence [T] without padding."""
    tree = _float64(params)
    x = tree["embed"][tokens]
    for index in range(config.num_layers):
        x = _layer(x, _pick(tree["layers"], index), config)
    x = _rms(x, tree["final_norm"], config.rms_eps)
    return x @ tree.get("head", tree["embed"]).T


def sequence_logprobs(
    params: dict[str, Any], tokens: np.ndarray, config: ModelConfig, temperature: float
) -> Any:
    """Log-probs [T - 1] of tokens[1:], and entropies [T - 1] of what they were drawn from, in nats."""
    scores = sequence_logits(params, tokens, config)[:-1] / temperature
    scores = scores - scores.max(axis=-1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return logs[np.arange(len(tokens) - 1), tokens[1:]], -(np.exp(logs) * logs).sum(axis=-1)


def _float64(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(leaf) for name, leaf in tree.items()}
    return np.asarray(tree, np.float64)


def _pick(tree: Any, index: int) -> Any:
    if isinstance(tree, dict):
        return {name: _pick(leaf, index) for name, leaf in tree.items()}
    return tree[index]


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _layer(x: np.ndarray, w: dict[str, Any], config: ModelConfig) -> np.ndarray:
    x = x + _attention(_rms(x, w["attn_norm"], config.rms_eps), w["attn"], config)
    h = _rms(x, w["mlp_norm"], config.rms_eps)
    if config.num_experts:
        return x + np.stack([_mixture(row, w["moe"], config) for row in h])
    m = w["mlp"]
    return x + (_silu(h @ m["gate"].T) * (h @ m["up"].T)) @ m["down"].T


def _mixture(h: np.ndarray, w: dict[str, Any], config: ModelConfig) -> np.ndarray:
    scores = w["router"] @ h
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    best = np.argsort(-probs, kind="stable")[: config.num_active]
    gates = probs[best] / probs[best].sum() if config.norm_topk else probs[best]
    out = np.zeros_like(h)
    for gate, e in zip(gates, best, strict=True):
        out += gate * (w["down"][e] @ (_silu(w["gate"][e] @ h) * (w["up"][e] @ h)))
    return out


def _attention(h: np.ndarray, w: dict[str, Any], config: ModelConfig) -> np.ndarray:
    length, c = len(h), config.head_dim
    q, k, v = (
        (h @ w[name].T + w.get(f"{name}_bias", 0.0)).reshape(length, -1, c) for name in ("q", "k", "v")
    )
    if config.qk_norm:
        q, k = _rms(q, w["q_norm"], config.rms_eps), _rms(k, w["k_norm"], config.rms_eps)
    q, k = _rope(q, config), _rope(k, config)
    group = config.num_heads // config.num_kv_heads
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(c)
        scores[np.triu_indices(length, 1)] = -np.inf
        probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = probs / probs.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return out.reshape(length, -1) @ w["out"].T


def _rope(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rotates pair (i, i + C/2) of position t by t / theta ** (2i / C), as complex numbers."""
    half = config.head_dim // 2
    angles = np.arange(len(x))[:, None] / config.rope_theta ** (np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)
