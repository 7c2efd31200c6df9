"""TRACE (arXiv 2610.07767): W4A4 on both sides, the trainer's rounding guided by the rollout's outcomes.

The rollout records, token by token, what its activations were rounded to at the guided sites of its deepest
layers; the trainer rounds its own activations there, under the rollout's scales, to the one of the two
bracketing codes that agrees with the record. Keys and values, in FP4 in the rollout's cache, are recorded and
guided likewise. Gradients pass straight through.
"""

import dataclasses
from typing import Literal

from fp4rl_jax.ops.spec import Backward, Capture, Form, MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Guided, Quantizer
from fp4rl_jax.recipes._parts import KvFormat, SiteConfig, act_of, side, weight_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SiteConfig):
    """The published setting.

    Attributes:
        kv: as `CacheConfig`.
        kv_form: what is recorded of keys and values, which are small beside the sites: "full" or "compact".
        format: of weights and activations.
        form: what is recorded of a guided activation: "compact" (one bit an element and the scales) or
            "full" (the codes and the scales).
        depth: share of the layers that are guided, the deepest ones, in (0, 1].
        guided: patterns of guided sites; the input of the MLP, or of the experts.
        backward: operands of the trainer's gradient matmuls; see `fp4rl_jax.ops.matmul`.
    """

    kv: KvFormat = "nvfp4"
    kv_form: Form = "full"
    format: Literal["nvfp4", "hif4", "mxfp4"] = "nvfp4"
    form: Form = "compact"
    depth: float = 0.5
    guided: tuple[str, ...] = ("*/gate_up",)
    backward: Backward = "dequantized"


def trainer(config: Config) -> SideSpec:
    """W4A4 fake quantization; guided sites follow the rollout's record where there is one."""
    act = act_of(config.format)
    spec = MatmulSpec(weight=weight_of(config.format), act=act, backward=config.backward)
    plain = side(config, spec)
    follows = dataclasses.replace(spec, act=Quantizer(act.fmt, Guided()))
    kv = None if plain.kv is None else Quantizer(plain.kv.fmt, Guided())
    rules = (*((pattern, follows) for pattern in config.guided), *plain.rules)
    return dataclasses.replace(plain, rules=rules, kv=kv)


def rollout(config: Config) -> SideSpec:
    """W4A4, recording the guided sites."""
    spec = MatmulSpec(weight=weight_of(config.format), act=act_of(config.format))
    kv = None if config.kv == "none" else config.kv_form
    capture = Capture(sites=config.guided, depth=config.depth, form=config.form, kv=kv)
    return dataclasses.replace(side(config, spec), capture=capture)
