"""Paired comparison of two models over the same items, with the smallest detectable difference and Holm's correction.

The difference is B - A, item by item: what both find easy or hard cancels (E. Miller, 'Adding error bars to evals',
arXiv 2411.00640, 2024). Right-or-wrong items on which both agree say nothing about which is better (McNemar 1947), so
few differing items give few degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from smalti.base.errors import UserError
from smalti.evals.statistics.averages import normalized, welch_df
from smalti.evals.statistics.clusters import Array, Clusters, ratio_of_sums, sums_by_cluster
from smalti.evals.statistics.intervals import Interval
from smalti.evals.statistics.student import quantile, two_sided_p

ALPHA = 0.05
POWER = 0.8
LEVEL = 0.04
"""A winner is named at this p value or less. At 5 %, the approximations of clustered errors would name one without a
true difference in up to 5.5 % of simulated comparisons."""

Verdict = Literal["A better", "B better", "no difference shown"]


@dataclass(frozen=True)
class Difference:
    """Two scores over the same items, and the standard error of B - A; None where there are too few items for one."""

    a: float
    b: float
    stderr: float | None
    df: float
    n: int
    differing: int
    """Number of clusters (of items, where they are independent) in which A and B differ."""
    clusters: int | None = None

    @property
    def value(self) -> float:
        """B - A."""
        return self.b - self.a

    @property
    def interval(self) -> Interval | None:
        """95 % interval of B - A, by Student's t."""
        if self.stderr is None:
            return None
        half = quantile(1 - ALPHA / 2, self.df) * self.stderr
        return self.value - half, self.value + half

    @property
    def p(self) -> float:
        """Probability of a difference at least this large if there is none; 1 without a standard error.

        At least 2^(1 - differing), the smallest p value of an exact test that exchanges A and B in each cluster.
        """
        if self.stderr is None or self.value == 0:
            return 1.0
        t = self.value / self.stderr if self.stderr else math.inf
        return min(1.0, max(two_sided_p(t, self.df), 2.0 ** (1 - self.differing)))

    def detectable(self, comparisons: int = 1) -> float | None:
        """Return the smallest true difference that a winner is named at with 80 % power, with this n and spread:
        (t(1 - level / 2) + t(0.8)) * stderr (Miller 2024).

        The level is ``LEVEL`` over the number of comparisons, the first step of Holm's correction.
        """
        if self.stderr is None:
            return None
        return (quantile(1 - LEVEL / comparisons / 2, self.df) + quantile(POWER, self.df)) * self.stderr

    def rescaled(self, chance: float) -> "Difference":
        """Return the difference of (score - chance) / (1 - chance)."""
        a, b = ((score - chance) / (1 - chance) for score in (self.a, self.b))
        return replace(self, a=a, b=b, stderr=None if self.stderr is None else self.stderr / (1 - chance))

    def verdict(self, p: float, *, higher_is_better: bool = True) -> Verdict:
        """Name the better model if ``p``, corrected for the number of comparisons, is at most ``LEVEL``."""
        if p > LEVEL or self.value == 0:
            return "no difference shown"
        return "B better" if (self.value > 0) == higher_is_better else "A better"


def of_items(a: ArrayLike, b: ArrayLike, clusters: Clusters = None) -> Difference:
    """Compare the means of item scores; items with an equal entry of ``clusters`` are dependent."""
    items_a, items_b = _same_length(a, b)
    difference = items_b - items_a
    sizes, sums = sums_by_cluster(clusters, difference)
    is_binary = bool(np.isin(np.concatenate([items_a, items_b]), (0.0, 1.0)).all())
    return _difference(
        float(items_a.mean()), float(items_b.mean()), sums, sizes, len(difference), is_binary, float(difference.var())
    )


def of_ratios(a: ArrayLike, b: ArrayLike, sizes: ArrayLike) -> Difference:
    """Compare sum(a) / sum(sizes) with sum(b) / sum(sizes), such as bits per byte over the same documents."""
    sums_a, sums_b = _same_length(a, b)
    n_bytes, _ = _same_length(sizes, a)
    total = n_bytes.sum()
    return _difference(float(sums_a.sum() / total), float(sums_b.sum() / total), sums_b - sums_a, n_bytes, len(n_bytes))


def average(differences: Sequence[Difference], weights: Sequence[float] | None = None) -> Difference:
    """Return the difference of two weighted means of independent scores; the weights are scaled to sum to 1."""
    shares = normalized(weights if weights is not None else [1.0] * len(differences))
    pairs = list(zip(shares, differences, strict=True))
    errors = [share * each.stderr for share, each in pairs if each.stderr is not None]
    has_errors = len(errors) == len(pairs)
    return Difference(
        a=math.fsum(share * each.a for share, each in pairs),
        b=math.fsum(share * each.b for share, each in pairs),
        stderr=math.hypot(*errors) if has_errors else None,
        df=welch_df(errors, [each.df for each in differences]) if has_errors else math.inf,
        n=sum(each.n for each in differences),
        differing=sum(each.differing for each in differences),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values adjusted by Holm (Scandinavian Journal of Statistics 6, 1979).

    The probability that any of them is wrongly below a level is at most that level, however the comparisons depend on
    each other.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _difference(
    a: float, b: float, sums: Array, sizes: Array, n: int, is_binary: bool = False, item_variance: float | None = None
) -> Difference:
    differing = int(np.count_nonzero(sums))
    clusters = None if is_binary and len(sizes) == n else len(sizes)
    if np.count_nonzero(sizes) < 2:
        return Difference(a, b, None, math.inf, n, differing, clusters)
    ratio = ratio_of_sums(sums, sizes, item_variance)
    if is_binary and ratio.variance < 1e-20:
        # No spread at all (mostly: no answer differs) is not certainty: the error of one answer each way more,
        # Bonett & Price (British Journal of Mathematical and Statistical Psychology 65, 2012).
        return Difference(a, b, math.sqrt(2) / len(sizes), math.inf, n, differing, clusters)
    effective = float(np.abs(sums).sum() ** 2 / (sums**2).sum()) if differing else 1.0
    return Difference(a, b, math.sqrt(ratio.variance), max(1.0, min(ratio.df, effective)), n, differing, clusters)


def _same_length(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    arrays = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if arrays[0].shape != arrays[1].shape or arrays[0].ndim != 1 or not len(arrays[0]):
        raise UserError(
            f"{arrays[0].size} scores cannot be paired with {arrays[1].size}",
            allowed="scores of the same items",
            hint="evaluate both models with the same suite, mode, shots, seed and limit",
        )
    if not (np.isfinite(arrays[0]).all() and np.isfinite(arrays[1]).all()):
        raise UserError("a score is not a finite number")
    return arrays
