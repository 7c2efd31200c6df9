"""RL maths as small pure functions on plain arrays: means, divergences, advantages, policy losses.

Nothing here knows a model, a sampler or a configuration. Arrays in, arrays out; every function
names the shapes, dtypes and units of what it takes. Read `means.py` first: it says how a sum
carries its denominator.
"""

from fp4rl_jax.objectives.means import Sums, masked_sequence_sum, masked_sum, merge, row_means, summed
from fp4rl_jax.objectives.mismatch import mismatch_metrics

__all__ = ["Sums", "masked_sequence_sum", "masked_sum", "merge", "mismatch_metrics", "row_means", "summed"]
