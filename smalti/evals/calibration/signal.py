"""The statistics of a calibration: relative spread, noise of checkpoints, rank correlation with a permutation test.

Signal and noise are those of Heineman et al. 2025, 'Signal and noise', arXiv 2508.13144: the dispersion of final
scores between models, and the standard deviation over the last checkpoints of one model, both over the mean.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Array = NDArray[np.float64]
_EXACT = 7
"""Most runs whose orders are all counted: 5,040; for more, ``_DRAWS`` random ones."""
_DRAWS = 9_999
_ROUNDING = 1e-9


def relative_std(values: ArrayLike) -> float:
    """Return the standard deviation (n - 1) over the mean, of values that are at least 0; 0 for equal values."""
    array = np.asarray(values, float)
    return _over_mean(float(array.std(ddof=1)), array)


def relative_range(values: ArrayLike) -> float:
    """Return the greatest difference over the mean, of values that are at least 0."""
    array = np.asarray(values, float)
    return _over_mean(float(np.ptp(array)), array)


def _over_mean(spread: float, values: _Array) -> float:
    return spread / float(values.mean()) if spread > _ROUNDING * float(values.max()) else 0.0


def pooled_std(groups: Sequence[Sequence[float]]) -> float:
    """Return the root mean square of the groups' relative standard deviations, weighted by their n - 1."""
    weights = [len(group) - 1 for group in groups]
    squares = [weight * relative_std(group) ** 2 for weight, group in zip(weights, groups, strict=True)]
    return math.sqrt(sum(squares) / sum(weights))


def ratio(signal: float, noise: float) -> float:
    """Return signal / noise: 0 without signal, infinite where only the noise is 0."""
    if signal == 0:
        return 0.0
    return signal / noise if noise else math.inf


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties; 0 where all of x or of y are equal."""
    return float(_correlations(_ranks(x), _ranks(y)[None])[0])


def kendall(x: ArrayLike, y: ArrayLike) -> float:
    """Return Kendall's tau-b; 0 where all of x or of y are equal."""
    signs = [np.sign(np.subtract.outer(values, values)) for values in (np.asarray(x, float), np.asarray(y, float))]
    scale = math.sqrt(float((signs[0] ** 2).sum() * (signs[1] ** 2).sum()))
    return float((signs[0] * signs[1]).sum()) / scale if scale else 0.0


def p_increasing(x: ArrayLike, y: ArrayLike) -> float:
    """Return the one-sided p of Spearman's correlation: the share of the orders of y with one at least as high.

    All orders are counted for up to 7 values; above that, 9,999 random ones of a fixed seed and the one observed.
    """
    x_ranks, y_ranks = _ranks(x), _ranks(y)
    n = len(y_ranks)
    if n <= _EXACT:
        orders = np.array(list(itertools.permutations(y_ranks)))
    else:
        drawn = np.random.default_rng(0).permuted(np.tile(y_ranks, (_DRAWS, 1)), axis=1)
        orders = np.vstack([y_ranks, drawn])
    observed = _correlations(x_ranks, y_ranks[None])[0]
    return float((_correlations(x_ranks, orders) >= observed - _ROUNDING).mean())


def _ranks(values: ArrayLike) -> _Array:
    """Return the ranks from 1 on; equal values have their mean rank."""
    array = np.asarray(values, float)
    less = (array[:, None] > array[None]).sum(axis=1)
    equal = (array[:, None] == array[None]).sum(axis=1)
    return np.asarray(less + (equal + 1) / 2, float)


def _correlations(x: _Array, rows: _Array) -> _Array:
    """Return Pearson's correlation of x with each row."""
    x, rows = x - x.mean(), rows - rows.mean(axis=1, keepdims=True)
    scale = np.sqrt((x**2).sum() * (rows**2).sum(axis=1))
    return np.divide(rows @ x, scale, out=np.zeros(len(rows)), where=scale > 0)
