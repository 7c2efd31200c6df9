"""W4A4 with one classic remedy for outliers in the rollout: what QUADS and Rollout-ResQ compare with.

- "smoothquant" (arXiv 2211.10438): scales move from activation channels to weight channels, calibrated
  anew at every publish;
- "hadamard": both operands of the rollout's products rotated along the inputs, 16 at a time;
- "clamp" (OCC, arXiv 2501.17116): outliers clamped, what was cut off added in high precision;
- "four_over_six" (arXiv 2512.02010): every NVFP4 block's maximum at 4 or at 6, on both sides.
"""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.spec import Backward, MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Quantizer
from fp4rl_jax.quantizers.residual import OutlierClamp
from fp4rl_jax.recipes._parts import SiteConfig, act_of, side, weight_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """Which remedy, in which format.

    Attributes:
        method: see the module.
        format: of weights and activations; "four_over_six" needs NVFP4.
        alpha: SmoothQuant's exponent: 0 leaves the scales in the activation, 1 moves them all.
        outliers: share of a token's activations that "clamp" cuts.
        backward: operands of the trainer's gradient matmuls; see `fp4rl_jax.ops.matmul`.
    """

    method: Literal["smoothquant", "hadamard", "clamp", "four_over_six"] = "smoothquant"
    format: Literal["nvfp4", "hif4", "mxfp4"] = "nvfp4"
    alpha: float = 0.5
    outliers: float = 0.01
    backward: Backward = "dequantized"


def _plain(config: Config) -> MatmulSpec:
    """W4A4; under four-over-six, whose quantizers are the same on both sides."""
    if config.method != "four_over_six":
        return MatmulSpec(weight=weight_of(config.format), act=act_of(config.format))
    if config.format != "nvfp4":
        raise ValueError(f"method 'four_over_six' is a rule of nvfp4's scales, got format {config.format!r}")
    options = {"four_over_six": "mse"}
    return MatmulSpec(weight=weight_of("nvfp4", **options), act=act_of("nvfp4", **options))


def trainer(config: Config) -> SideSpec:
    """W4A4 fake quantization without the remedy."""
    return side(config, dataclasses.replace(_plain(config), backward=config.backward))


def rollout(config: Config) -> SideSpec:
    """W4A4 with the remedy."""
    spec = _plain(config)
    if config.method == "smoothquant":
        spec = dataclasses.replace(spec, smoothing=config.alpha)
    elif config.method == "clamp":
        spec = dataclasses.replace(spec, residual=OutlierClamp(outliers=config.outliers))
    elif config.method == "hadamard":
        assert spec.weight is not None and spec.act is not None
        turned = (Quantizer(q.fmt, rotation="hadamard16") for q in (spec.weight, spec.act))
        spec = MatmulSpec(**dict(zip(("weight", "act"), turned, strict=True)))
    return side(config, spec)
