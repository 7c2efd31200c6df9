"""Estimates with their uncertainty: proportions, mean@k, pass@k and paired differences.

Host code on numpy arrays, shared by `evaluate`, the command line and the reports.
"""

import dataclasses
import math
from statistics import NormalDist

import numpy as np


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval.

    Attributes:
        value: the point estimate.
        low, high: ends of the two-sided interval.
        count: what the uncertainty is about: trials of a proportion, problems of a mean.
        method: how the interval was made, "wilson" or "bootstrap over problems".
    """

    value: float
    low: float
    high: float
    count: int
    method: str

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(successes: int, trials: int, *, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a proportion (Wilson 1927); independent trials.

    Raises:
        ValueError: no trials, or successes outside 0..trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"expected 0 <= successes <= trials and trials >= 1, got {successes} of {trials}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(value=p, low=min(low, p), high=max(high, p), count=trials, method="wilson")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is correct (Chen et al. 2021, eq. 1).

    1 - C(n - c, k) / C(n, k), in exact integer arithmetic until the last division.

    Raises:
        ValueError: k is outside 1..num_samples, or num_correct outside 0..num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples, got k = {k} of {num_samples} samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"expected 0 <= correct <= samples, got {num_correct} of {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def bootstrap_mean(values: np.ndarray, *, seed: int = 0, confidence: float = 0.95) -> Estimate:
    """Mean over problems with a percentile bootstrap interval (10,000 resamples of problems).

    Args:
        values: [N] float, one number a problem; the samples of one problem are not independent,
            so problems are what is resampled.
        seed: of the resampling; the same seed gives the same interval.
        confidence: two-sided level.

    Raises:
        ValueError: `values` is empty, not 1-D or not finite.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"expected a non-empty vector, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"value of problem {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    picks = np.random.default_rng(seed).integers(0, values.size, (10_000, values.size))
    means = values[picks].mean(axis=1)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(
        float(values.mean()),
        float(low),
        float(high),
        values.size,
        "bootstrap over problems",
    )


def paired_difference(before: np.ndarray, after: np.ndarray, *, seed: int = 0) -> Estimate:
    """Mean of after - before over the same problems, with a paired bootstrap interval.

    Args:
        before, after: [N] float, per-problem scores in the same order.
        seed: of the resampling.

    Raises:
        ValueError: the two have different shapes.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape:
        raise ValueError(f"paired scores need equal shapes, got {before.shape} and {after.shape}")
    return bootstrap_mean(after - before, seed=seed)


def pass_curve(correct: np.ndarray, ks: tuple[int, ...], *, seed: int = 0) -> dict[int, Estimate]:
    """pass@k for several k, averaged over problems.

    Args:
        correct: [N, samples] bool.
        ks: the k's, each at most `samples`.
        seed: of the bootstrap over problems.

    Returns:
        k -> estimate. With one sample a problem (k = 1) the trials are independent and the
        interval is Wilson's; otherwise problems are resampled.
    """
    correct = np.asarray(correct, bool)
    num_problems, num_samples = correct.shape
    if num_samples == 1 and ks == (1,):
        return {1: wilson(int(correct.sum()), num_problems)}
    counts = correct.sum(axis=1)
    scores = {k: np.array([pass_at_k(num_samples, int(c), k) for c in counts]) for k in ks}
    return {k: bootstrap_mean(values, seed=seed) for k, values in scores.items()}
