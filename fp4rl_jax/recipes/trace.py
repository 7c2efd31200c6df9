"""TRACE (arXiv 2610.07767): W4A4 on both sides, the trainer's rounding guided by the rollout's outcomes.

The rollout records, token by token, what its activations were rounded to at the guided sites of its deepest
layers; the trainer rounds its own activations there, under the rollout's scales, to the one of the two
bracketing codes that agrees with the record. Gradients pass straight through.
"""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.spec import Backward, Capture, Form, MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Guided, Quantizer
from fp4rl_jax.recipes._parts import SiteConfig, act_of, side, weight_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """The published setting, without the FP4 KV cache.

    Attributes:
        format: of weights and activations.
        form: what is recorded of a guided activation: "compact" (one bit an element and the scales) or
            "full" (the codes and the scales).
        depth: share of the layers that are guided, the deepest ones, in (0, 1].
        guided: patterns of guided sites; the input of the MLP, or of the experts.
        backward: operands of the trainer's gradient matmuls; see `fp4rl_jax.ops.matmul`.
    """

    format: Literal["nvfp4", "hif4", "mxfp4"] = "nvfp4"
    form: Form = "compact"
    depth: float = 0.5
    guided: tuple[str, ...] = ("*/gate_up",)
    backward: Backward = "dequantized"


def trainer(config: Config) -> SideSpec:
    """W4A4 fake quantization; guided sites follow the rollout's record where there is one."""
    act = act_of(config.format)
    spec = MatmulSpec(weight=weight_of(config.format), act=act, backward=config.backward)
    plain = side(config.sites, spec)
    follows = dataclasses.replace(spec, act=Quantizer(act.fmt, Guided()))
    return dataclasses.replace(
        plain, rules=(*((pattern, follows) for pattern in config.guided), *plain.rules)
    )


def rollout(config: Config) -> SideSpec:
    """W4A4, recording the guided sites."""
    spec = MatmulSpec(weight=weight_of(config.format), act=act_of(config.format))
    capture = Capture(sites=config.guided, depth=config.depth, form=config.form)
    return dataclasses.replace(side(config.sites, spec), capture=capture)
