"""What is done to or found out about a model outside of a run."""

from fp4rl_jax.analysis.upcycle import upcycle

__all__ = ["upcycle"]
