"""fp4rl_jax: reinforcement-learning post-training of language models with FP4 rollouts, in JAX."""

from fp4rl_jax.qtensor import QTensor, dequantize
from fp4rl_jax.quantizers import Guided, Nearest, Stochastic, fake_quantize, quantize

__all__ = ["Guided", "Nearest", "QTensor", "Stochastic", "dequantize", "fake_quantize", "quantize"]
