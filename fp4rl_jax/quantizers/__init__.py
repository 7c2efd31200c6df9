"""Array -> QTensor, and its differentiable round trip; the only callers of `Format.encode`."""

from fp4rl_jax.quantizers.api import fake_quantize, quantize
from fp4rl_jax.quantizers.quantizer import Quantizer
from fp4rl_jax.quantizers.rounding import CompactHint, Guided, Hint, Nearest, Rounding, Stochastic, compact

__all__ = [
    "CompactHint",
    "Guided",
    "Hint",
    "Nearest",
    "Quantizer",
    "Rounding",
    "Stochastic",
    "compact",
    "fake_quantize",
    "quantize",
]
