"""Intervals of scores: Wilson's for counts, the bootstrap for ratios, and the verdicts that follow."""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from smalti.base.errors import UserError

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

Verdict = Literal["above chance", "not above chance", "below chance"]


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """The score interval for a binomial share (E. B. Wilson, JASA 22, 1927, p. 209); 95 % by default.

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = successes / n. Unlike the normal interval it
    stays inside [0, 1] and has width at p = 0 and p = 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise UserError(f"{successes} successes of {n} is not a share", allowed="0 <= successes <= n, n at least 1")
    share, shrink = successes / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrink
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return low, high


def verdict(interval: tuple[float, float], chance: float) -> Verdict:
    """'above chance' only when the whole interval is above it."""
    low, high = interval
    if low > chance:
        return "above chance"
    return "below chance" if high < chance else "not above chance"


def bootstrap_ratio(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64], *, seed: int, resamples: int = 1000
) -> tuple[float, tuple[float, float]] | None:
    """Standard error and 95 % percentile interval of sum(numerators) / sum(denominators), units drawn with replacement.

    The ratio of sums is what is resampled (Efron & Tibshirani 1993, ch. 6 and 13), so units of unequal size count by
    their size. None for fewer than two units, which have no spread.
    """
    n = len(numerators)
    if n < 2:
        return None
    generator = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for index in range(resamples):
        while not denominators[drawn := generator.integers(n, size=n)].any():
            pass  # only units without size were drawn, which have no ratio
        ratios[index] = numerators[drawn].sum() / denominators[drawn].sum()
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(ratios.std(ddof=1)), (float(low), float(high))
