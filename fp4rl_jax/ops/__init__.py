"""Operations on plain arrays and quantized weights: what a model's forward is made of."""

from fp4rl_jax.ops.attention import attention
from fp4rl_jax.ops.attention_decode import attention_decode, cache_columns, decode_refusal
from fp4rl_jax.ops.grouped import grouped_matmul
from fp4rl_jax.ops.matmul import matmul
from fp4rl_jax.ops.norms import rms_norm
from fp4rl_jax.ops.operands import (
    Calibrated,
    Prepared,
    calibrated_weight,
    prepare,
    prepare_weight,
    quantize_weight,
    smoothed_weight,
    unguided,
)
from fp4rl_jax.ops.packed import pack_weight, stays_packed
from fp4rl_jax.ops.packing import Packed, holds
from fp4rl_jax.ops.report import SiteReport, report
from fp4rl_jax.ops.rounding import pointwise
from fp4rl_jax.ops.segments import Segment, by_head
from fp4rl_jax.ops.spec import HIGH_PRECISION, Capture, MatmulSpec, Side, SideSpec, SiteSpecs
from fp4rl_jax.ops.stats import (
    Kept,
    Stats,
    act_stats,
    error_shares,
    guided_stats,
    keep,
    kept_stats,
    quant_stats,
)

__all__ = [
    "HIGH_PRECISION",
    "Calibrated",
    "Capture",
    "Kept",
    "MatmulSpec",
    "Packed",
    "Prepared",
    "Segment",
    "Side",
    "SideSpec",
    "SiteReport",
    "SiteSpecs",
    "Stats",
    "act_stats",
    "attention",
    "attention_decode",
    "by_head",
    "cache_columns",
    "calibrated_weight",
    "decode_refusal",
    "error_shares",
    "grouped_matmul",
    "guided_stats",
    "holds",
    "keep",
    "kept_stats",
    "matmul",
    "pack_weight",
    "pointwise",
    "prepare",
    "prepare_weight",
    "quant_stats",
    "quantize_weight",
    "report",
    "rms_norm",
    "smoothed_weight",
    "stays_packed",
    "unguided",
]
