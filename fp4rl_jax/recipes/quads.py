"""QUADS (arXiv 2607.15810): W4A16 trainer, NVFP4 W4A4 rollout with residual activation compensation.

The rollout adds to y = DQ(Q(x)) W^T the term DQ(Q(r_I)) W_I^T, with r = x - DQ(Q(x)), I the columns with
the largest residual and W the weight as both sides quantize it: its codes and scales are used again.
"""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.quantizers import residual
from fp4rl_jax.recipes._parts import SiteConfig, act_of, residual_of, side, weight_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """The published setting, with whole blocks chosen at publish.

    Attributes:
        format: of weights, activations and residual.
        units: what is kept or dropped together: "blocks" of the format, or single "channels".
        score: "l2" of the residual, "max" of its magnitude, or "act_max" of the activation's.
        scope: "static" chooses at publish from running statistics, so that a token's result does not
            depend on its batch; "call" for each call, "token" for each token.
        ratio: share of the units kept, in (0, 1].
        residual_outer: the residual's outer scale: its own, "pow2" or "fp32", or the activation's
            ("shared").
        decay: of the running statistics, a params version.
    """

    format: Literal["nvfp4", "hif4", "mxfp4"] = "nvfp4"
    units: Literal["blocks", "channels"] = "blocks"
    score: Literal["l2", "max", "act_max"] = "l2"
    scope: Literal["static", "call", "token"] = "static"
    ratio: float = 0.5
    residual_outer: Literal["pow2", "fp32", "shared"] = "pow2"
    decay: float = 0.5


def trainer(config: Config) -> SideSpec:
    """Fake-quantizes weights only (asymmetric QAT); activations and gradients are untouched."""
    return side(config, MatmulSpec(weight=weight_of(config.format)))


def rollout(config: Config) -> SideSpec:
    """W4A4 with the second term."""
    selection = residual.make(
        config.units, ratio=config.ratio, score=config.score, scope=config.scope, decay=config.decay
    )
    second = residual_of(config.format, selection, order="select_first", outer=config.residual_outer)
    spec = MatmulSpec(weight=weight_of(config.format), act=act_of(config.format), residual=second)
    return side(config, spec)
