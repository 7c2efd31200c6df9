"""What a decoder looks like: the static description that every function of `models` takes."""

import dataclasses
import math
from typing import Literal

from fp4rl_jax.arrays import check_name

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")

DENSE_SITES = ("attn/qkv", "attn/out", "mlp/gate_up", "mlp/down")
EXPERT_SITES = ("attn/qkv", "attn/out", "experts/gate_up", "experts/down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency-dependent stretching of RoPE ("rope_type": "llama3").

    Wavelengths above `original_max_length / low_freq_factor` are stretched by `factor`, those
    below `original_max_length / high_freq_factor` are kept, and the ones between interpolate.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must exceed "
                f"low_freq_factor ({self.low_freq_factor})"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with RoPE, grouped-query attention and SwiGLU, dense or with experts.

    Attributes:
        family: which released family's conventions a checkpoint of it follows.
        vocab_size, num_layers, d_model: V, L, D.
        num_heads, num_kv_heads, head_dim: H, K, C; H must be a multiple of K.
        d_ff: F, the width of a dense layer's SwiGLU; unused when there are experts.
        rope_theta: base of the rotary frequencies. rope_scaling: their stretching, or None.
        rms_eps: epsilon of every RMS norm.
        tie_embeddings: the output head is the embedding; otherwise it is a leaf of its own.
        qkv_bias: q, k and v projections have biases (Qwen2).
        qk_norm: RMS norm of every query and key head before RoPE (Qwen3).
        num_experts, num_active, d_expert: E experts of width d_expert, of which each token uses
            the num_active best; 0 experts is a dense model.
        norm_topk: the gates of a token's active experts are divided by their sum.
        max_length: longest sequence, prompt and completion together.
    """

    family: Family = "llama"
    vocab_size: int = 512
    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    d_ff: int = 128
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_active: int = 0
    d_expert: int = 0
    norm_topk: bool = True
    max_length: int = 2048

    def __post_init__(self) -> None:
        check_name("model family", self.family, FAMILIES)
        for field in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "max_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        self._check_widths()

    def _check_widths(self) -> None:
        if self.num_experts == 0:
            if self.d_ff < 1:
                raise ValueError(f"a dense model needs d_ff >= 1, got {self.d_ff}")
            return
        if not 1 <= self.num_active <= self.num_experts:
            raise ValueError(f"num_active must be in 1..{self.num_experts}, got {self.num_active}")
        if self.d_expert < 1:
            raise ValueError(f"a model with experts needs d_expert >= 1, got {self.d_expert}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """What a run does about a mixture's router.

    Attributes:
        replay: routing replay. "on": the rollout records each token's experts and the trainer takes
            them, with its own gates; "measure": they are recorded and compared, each side routes by
            itself; "off".
        balance_coef: weight of the auxiliary load-balance loss; 0 leaves it out.
    """

    replay: Literal["off", "measure", "on"] = "off"
    balance_coef: float = 0.0

    def __post_init__(self) -> None:
        check_name("moe.replay", self.replay, ("off", "measure", "on"))
        if not (math.isfinite(self.balance_coef) and self.balance_coef >= 0):
            raise ValueError(
                f"moe.balance_coef is {self.balance_coef}, expected a finite number of at least 0"
            )

    def require(self, model: ModelConfig) -> None:
        """Raises ValueError: something is asked of a model that has no experts."""
        if model.num_experts == 0 and self != MoeConfig():
            raise ValueError(
                f"moe.replay = {self.replay!r}, moe.balance_coef = {self.balance_coef}:"
                " the model has no experts"
            )


def sites(config: ModelConfig) -> tuple[str, ...]:
    """The names of this model's quantizable sites: one per quantized input, in layer order."""
    return EXPERT_SITES if config.num_experts else DENSE_SITES


def num_parameters(config: ModelConfig) -> int:
    """How many parameters the master tree of this model holds (a tied head counts once)."""
    d, c = config.d_model, config.head_dim
    query, keyval = config.num_heads * c, config.num_kv_heads * c
    attention = d * (2 * query + 2 * keyval)
    attention += (query + 2 * keyval) * config.qkv_bias + 2 * c * config.qk_norm
    dense = 3 * d * config.d_ff
    experts = config.num_experts * (d + 3 * d * config.d_expert)
    layer = attention + 2 * d + (experts if config.num_experts else dense)
    heads = 1 if config.tie_embeddings else 2
    return config.num_layers * layer + heads * config.vocab_size * d + d
