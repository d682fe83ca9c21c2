"""Scores with a standard error and a 95 % interval: means of items, also in clusters, and ratios of sums.

Independent right-or-wrong items have Wilson's interval, clustered ones Wilson's at their effective n, other values
Student's t. Coverage: docs/concepts/evals/statistics.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from smalti.base.errors import UserError
from smalti.evals.statistics.clusters import Clusters, Ratio, ratio_of_sums, sums_by_cluster
from smalti.evals.statistics.student import quantile

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

Verdict = Literal["above chance", "not above chance", "below chance"]
Interval = tuple[float, float]

_RIGHT_OR_WRONG = (0.0, 1.0)
_ROUNDING = 1e-20
"""A variance of 0/1 items below this is 0 and rounding."""


@dataclass(frozen=True)
class Estimate:
    """A score with its standard error and 95 % interval; both are None where n is too small for them."""

    value: float
    stderr: float | None
    interval: Interval | None
    n: int
    method: str
    clusters: int | None = None
    """Number of clusters; None: the items are independent."""
    df: float = math.inf
    """Degrees of freedom of the interval; infinite: normal."""
    bounds: Interval | None = None
    """The least and the greatest possible value of a score of right-or-wrong items."""

    def to_score(self) -> dict[str, Any]:
        """Return the keys of a score in ``results.json``."""
        score: dict[str, Any] = {"value": self.value, "n": self.n, "stderr": self.stderr}
        score |= {"interval": list(self.interval) if self.interval else None, "interval_method": self.method}
        score |= {} if self.clusters is None else {"clusters": self.clusters}
        return score | ({"df": self.df} if math.isfinite(self.df) else {})

    @classmethod
    def from_score(cls, score: Mapping[str, Any]) -> "Estimate":
        """Read a score of ``results.json``, also one without ``stderr``."""
        ends = score.get("interval")
        return cls(
            value=float(score["value"]),
            stderr=score.get("stderr"),
            interval=(float(ends[0]), float(ends[1])) if ends else None,
            n=int(score.get("n", 0)),
            method=str(score.get("interval_method", "")),
            clusters=score.get("clusters"),
            df=float(score.get("df", math.inf)),
            bounds=_RIGHT_OR_WRONG if score.get("metric") == "accuracy" else None,
        )


def mean(values: ArrayLike, clusters: Clusters = None) -> Estimate:
    """Return the mean of item scores. Items with an equal entry of ``clusters`` (a passage, a subject) are dependent.

    The standard error of independent items is s / sqrt(n), that of clustered ones as in ``clusters.py`` (E. Miller,
    'Adding error bars to evals', arXiv 2411.00640, 2024). One cluster alone has no error. Raises UserError where there
    is no item or a value is not finite.
    """
    items = _finite(values)
    is_binary = bool(np.isin(items, (0.0, 1.0)).all())
    n = len(items)
    sizes, sums = sums_by_cluster(clusters, items)
    n_clusters = None if len(sizes) == n else len(sizes)
    if len(sizes) < 2:
        value = float(items.mean())
        if n_clusters is None and is_binary:
            return Estimate(value, None, wilson_interval(int(value), 1), 1, "wilson 95 %", bounds=_RIGHT_OR_WRONG)
        return Estimate(value, None, None, n, "none: one cluster" if n_clusters else "none: one item", n_clusters)
    ratio = ratio_of_sums(sums, sizes, float(items.var()))
    if not is_binary:
        return _student(ratio, n, n_clusters)
    stderr = math.sqrt(ratio.variance) if ratio.variance > _ROUNDING else 0.0
    if n_clusters is None:
        interval = wilson_interval(int(sums.sum()), n)
        return Estimate(ratio.value, stderr, interval, n, "wilson 95 %", bounds=_RIGHT_OR_WRONG)
    # Without any spread between clusters, the effective n is taken as the number of clusters, the least that it can be.
    effective_n = ratio.value * (1 - ratio.value) / ratio.variance if stderr else n_clusters
    interval = wilson(ratio.value, effective_n, quantile(0.975, ratio.df))
    method = "wilson 95 % at the effective n"
    return Estimate(ratio.value, stderr, interval, n, method, n_clusters, ratio.df, _RIGHT_OR_WRONG)


def bits_per_byte(nats: ArrayLike, n_bytes: ArrayLike) -> Estimate:
    """Return the bits of documents over their bytes, with Student's t at the standard error of a ratio of sums.

    One document with text alone has no error. Raises UserError where there is no text.
    """
    bits, sizes = _finite(nats) / math.log(2), _finite(n_bytes)
    if not sizes.sum():
        raise UserError("bits per byte of no text are not defined", allowed="one or more bytes")
    if np.count_nonzero(sizes) < 2:
        return Estimate(float(bits.sum() / sizes.sum()), None, None, len(bits), "none: one document")
    return _student(ratio_of_sums(bits, sizes), len(bits), None)


def wilson_interval(successes: int, n: int, z: float = Z_95) -> Interval:
    """Return the score interval of a binomial share (E. B. Wilson, JASA 22, 1927, p. 209); 95 % by default.

    (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) with p = successes / n. Unlike the normal interval it
    stays inside [0, 1] and has width at p = 0 and p = 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise UserError(f"{successes} successes of {n} is not a share", allowed="0 <= successes <= n, n at least 1")
    return wilson(successes / n, n, z)


def wilson(share: float, n: float, z: float) -> Interval:
    """Return ``wilson_interval`` of a share at an effective n, which need not be a whole number."""
    shrink = 1 + z * z / n
    middle = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrink
    return (0.0 if share == 0 else max(0.0, middle - half)), (1.0 if share == 1 else min(1.0, middle + half))


def verdict(interval: Interval, chance: float) -> Verdict:
    """Return 'above chance' only when the whole interval is above it."""
    low, high = interval
    if low > chance:
        return "above chance"
    return "below chance" if high < chance else "not above chance"


def bootstrap_ratio(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64], *, seed: int, resamples: int = 1000
) -> tuple[float, Interval] | None:
    """Return standard error and 95 % interval of sum(numerators) / sum(denominators), units drawn with replacement.

    The ratio of sums is what is resampled (Efron & Tibshirani 1993, ch. 6 and 13), so units of unequal size count by
    their size. The interval is Student's t with this standard error: the percentiles of the resamples cover the
    truth in 88 % of simulated sets of 10 documents. None for fewer than two units, which have no spread.
    """
    n = len(numerators)
    if np.count_nonzero(denominators) < 2:
        return None
    generator = np.random.default_rng(seed)
    ratios = np.empty(resamples)
    for index in range(resamples):
        while not denominators[drawn := generator.integers(n, size=n)].any():
            pass  # only units without size were drawn, which have no ratio
        ratios[index] = numerators[drawn].sum() / denominators[drawn].sum()
    stderr = float(ratios.std(ddof=1)) * math.sqrt(n / (n - 1))  # resamples of n vary less than samples, by (n - 1) / n
    ratio = ratio_of_sums(numerators, denominators)
    half = quantile(0.975, ratio.df) * stderr
    return stderr, (ratio.value - half, ratio.value + half)


def _student(ratio: Ratio, n: int, n_clusters: int | None) -> Estimate:
    stderr = math.sqrt(ratio.variance)
    half = quantile(0.975, ratio.df) * stderr
    return Estimate(
        ratio.value, stderr, (ratio.value - half, ratio.value + half), n, "student's t 95 %", n_clusters, ratio.df
    )


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    items = np.asarray(values, dtype=np.float64)
    if items.ndim != 1 or not len(items) or not np.isfinite(items).all():
        raise UserError("the mean of these scores is not defined", allowed="one or more finite numbers")
    return items
