"""The standard error of a ratio of sums over independent clusters, and its degrees of freedom.

The mean of clustered items is such a ratio (values over items), and so are bits per byte (bits over bytes, a document
each). Items that are independent are clusters of size 1.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Clusters = Sequence[Hashable | None] | NDArray[Any] | None
"""The cluster of each item; None: items are independent, or this one is."""


@dataclass(frozen=True)
class Ratio:
    """A ratio, its variance, and the degrees of freedom of Student's t for it."""

    value: float
    variance: float
    df: float


def ratio_of_sums(sums: Array, sizes: Array, item_variance: float | None = None) -> Ratio:
    """Return sum(sums) / sum(sizes) over two or more clusters with the bias-reduced variance (CR2).

    Residual of a cluster: e = sum - ratio * size. Variance: sum of e^2 / (1 - share of the size) / total size^2, the
    CR2 of Bell & McCaffrey (Survey Methodology 28, 2002) for a mean; with equal sizes it is the usual clustered
    variance times G / (G - 1) (Cameron & Miller, Journal of Human Resources 50, 2015, section VI). Degrees of freedom:
    the smaller of two approximations by Satterthwaite, for unequal sizes and for heavy tails, at most clusters - 1.
    From ``item_variance``, the variance of an item, follows the correlation within clusters; None: it is taken as 0.
    """
    total = sizes.sum()
    ratio = sums.sum() / total
    scale = 1 / (1 - sizes / total)
    squares = (sums - ratio * sizes) ** 2 * scale
    variance = squares.sum()
    correlation = 0.0
    pairs = (sizes * (sizes - 1)).sum()
    if item_variance and pairs > 0:
        correlation = float(np.clip((variance / item_variance - total) / pairs, 0, 1))
    df = min(_df_of_sizes(sizes, scale, correlation), _df_of_tails(squares), len(sizes) - 1)
    return Ratio(float(ratio), float(variance / total**2), max(df, 1.0))


def sums_by_cluster(clusters: Clusters, items: Array) -> tuple[Array, Array]:
    """Return the number of items of each cluster and their sum."""
    if clusters is None:
        return np.ones(len(items)), items
    numbers: dict[Hashable, int] = {}
    rows = [
        numbers.setdefault((position,) if name is None else ("named", name), len(numbers))
        for position, name in enumerate(clusters)
    ]
    return np.bincount(rows).astype(np.float64), np.bincount(rows, weights=items).astype(np.float64)


def _df_of_sizes(sizes: Array, scale: Array, correlation: float) -> float:
    """Return 2 E[V]^2 / Var[V] of the variance estimate V if the cluster sums were normal with equicorrelated items.

    The working model of Imbens & Kolesar (Review of Economics and Statistics 98, 2016), in closed form: V is a
    quadratic form of the sums, whose matrix is diag(scale) plus one of rank 2.
    """
    total = sizes.sum()
    variances = sizes * (1 + (sizes - 1) * correlation)
    leverage = scale * sizes / total
    constant = (leverage * sizes).sum() / total
    diagonal = constant - 2 * leverage
    expected = (variances * (scale + diagonal)).sum()
    v0, v1, v2 = (float((variances * leverage**power).sum()) for power in (0, 1, 2))
    low_rank = constant**2 * v0**2 - 4 * constant * v0 * v1 + 2 * v0 * v2 + 2 * v1**2
    spread = low_rank + ((2 * scale * diagonal + scale**2) * variances**2).sum()
    return float(expected**2 / spread)


def _df_of_tails(squares: Array) -> float:
    """Return 2 V^2 / Var[V] with V the sum of ``squares`` and its variance as observed: small where few clusters make
    up most of V, as where nearly all answers are right."""
    total = squares.sum()
    spread = (squares**2).sum() - total**2 / len(squares)
    return float(2 * total**2 / spread) if spread > 0 else np.inf
