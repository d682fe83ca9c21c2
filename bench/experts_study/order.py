"""The order of the runs: which runs the results so far call for. Scores are held-out bits per byte, less is better."""

import math
import statistics
from collections.abc import Mapping

from experts_study.settings import DECIDING, Length, Run, Size

Scores = Mapping[Run, float]


def next_runs(scores: Scores, size: Size, seeds: int, grid_seeds: int) -> list[Run]:
    """Return the runs without a score that are called for by now: those of the deciding kinds, then the shortest.

    At each length a kind trains ``grid_seeds`` seeds of each rate; its best rate gets all ``seeds`` (at least the
    length's ``min_seeds``), and its best rates go to the next length. Rates are added where the best is at an edge. A
    rate that diverged (its score is infinite) is never the best.
    """
    runs: list[Run] = []
    for kind in size.lengths[0].kinds:
        for length, rates in rates_of(scores, size, kind, grid_seeds):
            runs += [run for lr in rates for run in length.grid(kind, lr, grid_seeds)]
            best = best_rate(scores, kind, length, grid_seeds)
            if best is not None and _complete(scores, kind, length, rates, grid_seeds):
                runs += [Run(kind, length.steps, best, seed) for seed in range(max(seeds, length.min_seeds))]
    missing = [run for run in dict.fromkeys(runs) if run not in scores]
    return sorted(missing, key=lambda run: (run.kind not in DECIDING, run.steps, run.seed))


def all_runs(scores: Scores, size: Size, seeds: int, grid_seeds: int) -> list[Run]:
    """Return all runs of the study, finished ones too, if no more rates have to be added."""
    centre = math.sqrt(size.rates[0] * size.rates[-1]) * 1.01
    guesses = dict(scores)
    while runs := next_runs(guesses, size, seeds, grid_seeds):
        guesses |= {run: 1e6 + abs(math.log(run.lr / centre)) for run in runs}
    return list(guesses)


def rates_of(scores: Scores, size: Size, kind: str, grid_seeds: int) -> list[tuple[Length, tuple[float, ...]]]:
    """Return the lengths that a kind has reached, each with the rates that it trains there."""
    reached: list[tuple[Length, tuple[float, ...]]] = []
    rates = size.rates
    for length in size.lengths:
        if kind not in length.kinds:
            break
        rates = _extended(scores, kind, length, rates[: length.rates], grid_seeds)
        reached.append((length, rates))
        if not _complete(scores, kind, length, rates, grid_seeds):
            break
        rates = tuple(sorted(rates, key=lambda lr: (_mean(scores, kind, length, lr, grid_seeds), lr)))
    return reached


def best_rate(scores: Scores, kind: str, length: Length, grid_seeds: int) -> float | None:
    """Return the rate with the lowest mean over ``grid_seeds`` seeds; None if none has them all or all diverged."""
    rates = {run.lr for run in scores if (run.kind, run.steps) == (kind, length.steps)}
    means = {lr: _mean(scores, kind, length, lr, grid_seeds) for lr in rates}
    finite = {lr: mean for lr, mean in means.items() if math.isfinite(mean)}
    return min(finite, key=lambda lr: finite[lr]) if finite else None


def _extended(
    scores: Scores, kind: str, length: Length, rates: tuple[float, ...], grid_seeds: int
) -> tuple[float, ...]:
    for _ in range(length.extensions):
        if not _complete(scores, kind, length, rates, grid_seeds):
            break
        # where all diverged, the lowest
        best = min(rates, key=lambda lr: (_mean(scores, kind, length, lr, grid_seeds), lr))
        if best not in (min(rates), max(rates)):
            break
        rates = (*rates, best / 2 if best == min(rates) else best * 2)
    return rates


def _complete(scores: Scores, kind: str, length: Length, rates: tuple[float, ...], grid_seeds: int) -> bool:
    return all(run in scores for lr in rates for run in length.grid(kind, lr, grid_seeds))


def _mean(scores: Scores, kind: str, length: Length, lr: float, grid_seeds: int) -> float:
    """Return the mean over the seeds that choose; infinite if one is missing, or if a run of any seed diverged."""
    of_rate = [score for run, score in scores.items() if (run.kind, run.steps, run.lr) == (kind, length.steps, lr)]
    if not all(map(math.isfinite, of_rate)):
        return math.inf
    return statistics.mean(scores.get(run, math.inf) for run in length.grid(kind, lr, grid_seeds))
