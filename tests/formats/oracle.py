"""Independent references in float64 numpy and Python integers, element by element where need be."""

from fractions import Fraction

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
S1P2 = np.arange(8) / 4
E4M3 = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
)


def nearest(value: float, grid: np.ndarray, *, ties: str) -> int:
    """Index of the grid point nearest to a non-negative value; exact, by fractions."""
    exact = Fraction(float(value))
    best, best_distance = 0, None
    for i, point in enumerate(grid):
        distance = abs(Fraction(float(point)) - exact)
        tie_wins = distance == best_distance and (ties == "away" or i % 2 == 0)
        if best_distance is None or distance < best_distance or tie_wins:
            best, best_distance = i, distance
    return best


def relative_mse(x: np.ndarray, approximation: np.ndarray) -> float:
    """mean((x^ - x)^2) / mean(x^2) in float64."""
    x, approximation = x.astype(np.float64), np.asarray(approximation, np.float64)
    return float(np.mean((approximation - x) ** 2) / np.mean(x**2))
