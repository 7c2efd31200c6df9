"""Parts that several recipes share: which sites, and the usual quantizers."""

import dataclasses
from typing import Literal

from fp4rl_jax import formats
from fp4rl_jax.arrays import check_name
from fp4rl_jax.ops.spec import MatmulSpec, SideSpec
from fp4rl_jax.quantizers import Quantizer

Sites = Literal["block_linears", "routed_experts"]

#: Site patterns by name. Sites of a block have a slash in their name; the embedding, the head, the
#: norms and the router are no such sites and are never quantized.
SITE_PATTERNS = {"block_linears": "*/*", "routed_experts": "experts/*"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteConfig:
    """The knob of every recipe.

    Attributes:
        sites: "block_linears" (every linear layer of every block) or "routed_experts" (the
            experts of a mixture only; a dense model refuses it by name).
    """

    sites: Sites = "block_linears"


def side(sites: Sites, spec: MatmulSpec) -> SideSpec:
    """A side that applies `spec` to the named sites and quantizes nothing else."""
    pattern = SITE_PATTERNS[check_name("sites", sites, SITE_PATTERNS)]
    return SideSpec(rules=((pattern, spec),))


def nvfp4_weight() -> Quantizer:
    """NVFP4 weights: blocks of 16 along the inputs, one power-of-two outer scale a tensor."""
    return Quantizer(formats.make("nvfp4", outer="tensor"))


def nvfp4_act() -> Quantizer:
    """NVFP4 activations: blocks of 16, one power-of-two outer scale a token."""
    return Quantizer(formats.make("nvfp4", outer="row"))


def fp8() -> Quantizer:
    """FP8 E4M3 with one float32 scale a row: a token's, or a weight's output channel's."""
    return Quantizer(formats.make("fp8_e4m3"))
