"""Averages of scores: rescaled accuracies, sub-categories, categories and the core average, with propagated errors.

The scores that are averaged must be of different items, and so independent.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import variance

from smalti.base.errors import UserError
from smalti.evals.statistics.intervals import Estimate, Interval, wilson
from smalti.evals.statistics.student import quantile


def rescaled(score: Estimate, chance: float) -> Estimate:
    """Return (score - chance) / (1 - chance): 0 at chance, 1 if all is right, as in LLM Foundry's Gauntlet."""
    if not 0 <= chance < 1:
        raise UserError(f"chance {chance} is not that of a task", allowed="0 up to, but not, 1")

    def scale(value: float) -> float:
        return (value - chance) / (1 - chance)

    return replace(
        score,
        value=scale(score.value),
        stderr=None if score.stderr is None else score.stderr / (1 - chance),
        interval=None if score.interval is None else (scale(score.interval[0]), scale(score.interval[1])),
        bounds=(scale(0.0), 1.0),
    )


def average(scores: Sequence[Estimate], weights: Sequence[float] | None = None) -> Estimate:
    """Return the weighted mean of independent scores; equal weights by default. Weights are scaled to sum to 1.

    Standard error: sqrt(sum of (w * stderr)^2). Interval: at each end the wider of two. One propagates the distances of
    the ends from their scores in the same way (MOVER: Zou & Donner, Statistics in Medicine 27, 2008), which holds where
    a score of few items has no spread. The other is Wilson's at the effective n of the average (Student's t where
    scores are not of right-or-wrong items), which holds for many scores of few items. Those of few clusters count with
    the degrees of freedom of the average (Welch & Satterthwaite). The average has no interval where a score has none.
    Scores of weight 0 are left out.
    """
    shares = normalized(weights if weights is not None else [1.0] * len(scores))
    if len(shares) != len(scores):
        raise UserError(f"{len(scores)} scores and {len(shares)} weights", allowed="a weight for each score")
    scores = [score for share, score in zip(shares, scores, strict=True) if share]
    shares = [share for share in shares if share]
    if len(scores) == 1:
        return scores[0]
    value = math.fsum(share * score.value for share, score in zip(shares, scores, strict=True))
    n = sum(score.n for score in scores)
    if any(score.interval is None for score in scores):
        return Estimate(value, None, None, n, "none: a score has no interval")
    variances = _variances(scores)
    has_spread = any(variances)
    if not has_spread:
        variances = [1 / _units(score) for score in scores]
    errors = [share * math.sqrt(variance) for share, variance in zip(shares, variances, strict=True)]
    error = math.hypot(*errors)
    df = welch_df(errors, [score.df for score in scores])
    bounds = _bounds(shares, scores)
    low, high = _propagated(value, shares, scores, df)
    if bounds is not None:
        least, width = bounds[0], bounds[1] - bounds[0]
        share = min(1.0, max(0.0, (value - least) / width))
        effective_n = share * (1 - share) * (width / error) ** 2 if has_spread else error**-2
        ends = wilson(share, effective_n, quantile(0.975, df))
        wilson_low, wilson_high = least + width * ends[0], least + width * ends[1]
        low, high = (min(low, wilson_low), max(high, wilson_high)) if has_spread else (wilson_low, wilson_high)
    elif has_spread:
        half = quantile(0.975, df) * error
        low, high = min(low, value - half), max(high, value + half)
    method = f"propagated 95 %, of {len(scores)} scores"
    return Estimate(value, error if has_spread else 0.0, (low, high), n, method, df=df, bounds=bounds)


def welch_df(errors: Sequence[float], dfs: Sequence[float]) -> float:
    """Return the degrees of freedom of a sum of independent errors: (sum of e^2)^2 / sum of (e^4 / df)."""
    variance = math.fsum(error**2 for error in errors)
    spread = math.fsum(error**4 / df for error, df in zip(errors, dfs, strict=True))
    return variance**2 / spread if spread else math.inf


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum. Raises UserError where one is negative or all are 0."""
    total = math.fsum(weights)
    if not weights or min(weights) < 0 or not 0 < total < math.inf:
        raise UserError(f"weights {list(weights)} make no average", allowed="0 or more, at least one above 0")
    return [weight / total for weight in weights]


def _units(score: Estimate) -> int:
    return score.clusters or score.n


def _variances(scores: Sequence[Estimate]) -> list[float]:
    """Return the variances of scores, each as if it had one item (cluster) more, of the variance that items have.

    By chance, a score of few items may have no spread, and one of a single item has none; over equal sizes the sum
    stays the same. The variance that items have is the largest of three, because scores of few items may differ from
    the others: that within scores where each item weighs the same, that where a score weighs about as much as its
    variance does in the average, and that between scores of a single item.
    """
    sizes = [_units(score) for score in scores]
    of_items = [(score.stderr or 0.0) ** 2 * size for score, size in zip(scores, sizes, strict=True)]
    single = [score.value for score, size in zip(scores, sizes, strict=True) if size == 1]
    largest = variance(single) if len(single) > 1 else 0.0
    for power in (0, 2) if len(single) < len(scores) else ():
        weights = [(size - 1) / size**power for size in sizes]
        within = math.fsum(weight * each for weight, each in zip(weights, of_items, strict=True))
        largest = max(largest, within / math.fsum(weights))
    return [((size - 1) * each + largest) / size**2 for size, each in zip(sizes, of_items, strict=True)]


def _bounds(shares: Sequence[float], scores: Sequence[Estimate]) -> Interval | None:
    """Return the least and the greatest value of the average; None where a score has none."""
    bounds = [score.bounds for score in scores]
    ends = [
        math.fsum(share * each[end] for share, each in zip(shares, bounds, strict=True) if each is not None)
        for end in (0, 1)
    ]
    return None if None in bounds else (ends[0], ends[1])


def _propagated(value: float, shares: Sequence[float], scores: Sequence[Estimate], df: float) -> Interval:
    below, above = [], []
    for share, score in zip(shares, scores, strict=True):
        assert score.interval is not None
        scale = share * quantile(0.975, df) / quantile(0.975, score.df) if math.isfinite(score.df) else share
        below.append(scale * (score.value - score.interval[0]))
        above.append(scale * (score.interval[1] - score.value))
    return value - math.hypot(*below), value + math.hypot(*above)
