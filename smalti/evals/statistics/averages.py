"""Averages of scores: rescaled accuracies, sub-categories, categories and the core average, with propagated errors.

The scores that are averaged must be of different items, and so independent.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from smalti.base.errors import UserError
from smalti.evals.statistics.intervals import Estimate, Interval
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
    )


def average(scores: Sequence[Estimate], weights: Sequence[float] | None = None) -> Estimate:
    """Return the weighted mean of independent scores; equal weights by default. Weights are scaled to sum to 1.

    Standard error: sqrt(sum of (w * stderr)^2). Interval: the distances of each end from its score are propagated in
    the same way (MOVER: Zou & Donner, Statistics in Medicine 27, 2008), so scores near 0 or 1 keep their asymmetric
    intervals; those of few clusters count with the degrees of freedom of the average (Welch & Satterthwaite). The
    average has no interval where one of the scores has none.
    """
    shares = normalized(weights if weights is not None else [1.0] * len(scores))
    if len(shares) != len(scores):
        raise UserError(f"{len(scores)} scores and {len(shares)} weights", allowed="a weight for each score")
    value = math.fsum(share * score.value for share, score in zip(shares, scores, strict=True))
    errors = [share * score.stderr for share, score in zip(shares, scores, strict=True) if score.stderr is not None]
    has_errors = len(errors) == len(scores)
    df = welch_df(errors, [score.df for score in scores]) if has_errors else math.inf
    interval = _propagated(value, shares, scores, df)
    return Estimate(
        value=value,
        stderr=math.hypot(*errors) if has_errors else None,
        interval=interval,
        n=sum(score.n for score in scores),
        method=f"propagated 95 %, of {len(scores)} scores" if interval else "none: a score has no interval",
        df=df,
    )


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


def _propagated(value: float, shares: Sequence[float], scores: Sequence[Estimate], df: float) -> Interval | None:
    below, above = [], []
    for share, score in zip(shares, scores, strict=True):
        if score.interval is None:
            return None
        scale = share * quantile(0.975, df) / quantile(0.975, score.df) if math.isfinite(score.df) else share
        below.append(scale * (score.value - score.interval[0]))
        above.append(scale * (score.interval[1] - score.value))
    return value - math.hypot(*below), value + math.hypot(*above)
