"""Parts that several recipes share: which sites, and the usual quantizers."""

import dataclasses
from typing import Literal

from fp4rl_jax import formats
from fp4rl_jax.arrays import check_name
from fp4rl_jax.formats import Format
from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Quantizer, Stochastic
from fp4rl_jax.quantizers.residual import Residual, Selection

Sites = Literal["block_linears", "routed_experts"]
KvFormat = Literal["none", "nvfp4", "mxfp4", "hif4", "fp8_e4m3"]
ScaleRule = Literal["floor", "even", "rceil", "ceil", "uos"]

#: Site patterns by name. Sites of a block have a slash in their name; the embedding, the head, the
#: norms and the router are no such sites and are never quantized.
SITE_PATTERNS = {"block_linears": "*/*", "routed_experts": "experts/*"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The knob of every recipe.

    Attributes:
        kv: format of the side's keys and values along head_dim, or "none": the rollout's cache is packed in
            it, the trainer attends to the values that it stands for. The two sides may differ.
    """

    kv: KvFormat = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteConfig(CacheConfig):
    """The knobs of every recipe that quantizes linear layers.

    Attributes:
        kv: as `CacheConfig`.
        sites: "block_linears" (every linear layer of every block) or "routed_experts" (the
            experts of a mixture only; a dense model refuses it by name).
    """

    sites: Sites = "block_linears"


def side(config: SiteConfig, spec: MatmulSpec) -> SideSpec:
    """A side that applies `spec` to the configured sites, with the configured KV cache."""
    pattern = SITE_PATTERNS[check_name("sites", config.sites, SITE_PATTERNS)]
    return SideSpec(rules=((pattern, spec),), kv=kv_of(config.kv))


def kv_of(name: KvFormat) -> Quantizer | None:
    """Keys and values in a format; its outer scale, where it has one, is static."""
    if name == "none":
        return None
    fmt = formats.make(name)
    return Quantizer(fmt if fmt.span == "none" else formats.make(fmt, outer="static"))


def nvfp4_weight() -> Quantizer:
    """NVFP4 weights: blocks of 16 along the inputs, one power-of-two outer scale a tensor."""
    return Quantizer(formats.make("nvfp4", outer="tensor"))


def nvfp4_act() -> Quantizer:
    """NVFP4 activations: blocks of 16, one power-of-two outer scale a token."""
    return Quantizer(formats.make("nvfp4", outer="row"))


def spanning(name: str, outer: str, **options: object) -> Format:
    """A 4-bit format whose outer scale, where it has one by default, spans a "tensor" or a "row"."""
    fmt = formats.make(name, **options)
    return fmt if fmt.span == "none" else formats.make(fmt, outer=outer)


def weight_of(name: str, **options: object) -> Quantizer:
    """Weights in a 4-bit format; one outer scale a tensor, where the format has one."""
    return Quantizer(spanning(name, "tensor", **options))


def act_of(name: str, **options: object) -> Quantizer:
    """Activations in a 4-bit format; one outer scale a token, where the format has one."""
    return Quantizer(spanning(name, "row", **options))


def rule_of(name: str, scale_rule: ScaleRule | None) -> dict[str, object]:
    """The options of a format whose scale rule a recipe sets.

    Raises:
        ValueError: a rule for a format that has none.
    """
    if scale_rule is None:
        return {}
    if name != "mxfp4":
        raise ValueError(f"scale_rule = {scale_rule!r} is for format 'mxfp4', got format = {name!r}")
    return {"scale_rule": scale_rule}


def residual_of(
    name: str,
    selection: Selection,
    *,
    order: str,
    outer: Literal["pow2", "fp32", "shared"] = "pow2",
    scale_rule: ScaleRule | None = None,
) -> Residual:
    """The residual's second pass in a format.

    Args:
        name: of the format.
        selection: which elements.
        order: "select_first" or "quantize_first".
        outer: the residual's outer scale: its own, a power of two or float32, or the activation's;
            without effect on a format that has none.
        scale_rule: as `rule_of`.
    """
    fmt = spanning(name, "static" if outer == "shared" else "row", **rule_of(name, scale_rule))
    if outer == "fp32" and fmt.span != "none":
        fmt = formats.make(fmt, outer_rounding="fp32")
    share = "shared" if fmt.span == "static" else "own"
    return Residual(selection=selection, quantizer=Quantizer(fmt), order=order, outer=share)  # pyright: ignore[reportArgumentType]


def gradient_of(
    name: str, *, rounding: Literal["nearest", "stochastic"], outer: Literal["none", "tensor", "row"]
) -> Quantizer:
    """Gradients in a 4-bit format.

    Stochastic rounding goes with scales that clip nothing where the format can choose them
    (`scale_rounding="up"`, or the rule `rceil`): only then is it unbiased at every element.

    Raises:
        ValueError: `outer` asks for an outer scale that the format does not offer.
    """
    options: dict[str, object] = {}
    known = {field.name for field in dataclasses.fields(formats.make(name))}
    if rounding == "stochastic":
        choice = {"scale_rounding": "up", "scale_rule": "rceil"}
        options = {field: value for field, value in choice.items() if field in known}
    if outer != "none":
        if "outer" not in known:
            raise ValueError(f"grad_outer = {outer!r}: format {name} has no outer scale")
        options["outer"] = outer
    fmt = spanning(name, "row", **options) if outer == "none" else formats.make(name, **options)
    return Quantizer(fmt, Stochastic()) if rounding == "stochastic" else Quantizer(fmt)


def fp8() -> Quantizer:
    """FP8 E4M3 with one float32 scale a row: a token's, or a weight's output channel's."""
    return Quantizer(formats.make("fp8_e4m3"))
