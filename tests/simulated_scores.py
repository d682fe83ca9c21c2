"""Synthetic scores of models, drawn from known truths: right-or-wrong items in clusters, pairs of models, documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.evals.statistics import averages, intervals, paired

Array = NDArray[Any]


@dataclass(frozen=True)
class Items:
    """Sizes of the clusters of a task: all 1 where items are independent."""

    sizes: tuple[int, ...]

    @property
    def n(self) -> int:
        return sum(self.sizes)

    @property
    def clusters(self) -> list[int] | None:
        return None if max(self.sizes) == 1 else np.repeat(np.arange(len(self.sizes)), self.sizes).tolist()


def independent(n: int) -> Items:
    return Items((1,) * n)


def equal(clusters: int, size: int) -> Items:
    return Items((size,) * clusters)


def unequal(clusters: int, size: int, *, spread: float = 0.7) -> Items:
    """Lognormal sizes around ``size``, always the same ones."""
    draws = np.random.default_rng(clusters).normal(0, spread, clusters)
    return Items(tuple(int(max(1, round(size * np.exp(draw)))) for draw in draws))


def correct(draw: np.random.Generator, items: Items, accuracy: float, correlation: float) -> Array:
    """0/1 for each item: a cluster's own accuracy is beta, with this correlation between two of its items."""
    return draw.random(items.n) < np.repeat(_beta(draw, accuracy, correlation, len(items.sizes)), items.sizes)


def two_models(
    draw: np.random.Generator, items: Items, differ: float, difference: float, correlation: float
) -> tuple[Array, Array]:
    """0/1 of A and B, which differ on the share ``differ`` of the items; B is more accurate by ``difference``."""
    share = _beta(draw, differ, correlation, len(items.sizes))
    favour = _beta(draw, 0.5 + difference / differ / 2, correlation, len(items.sizes))
    is_different = draw.random(items.n) < np.repeat(share, items.sizes)
    is_better = draw.random(items.n) < np.repeat(favour, items.sizes)
    both = draw.random(items.n) < 0.5
    a = np.where(is_different, ~is_better, both)
    return a, np.where(is_different, is_better, both)


def documents(draw: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Bits and bytes of documents: lognormal sizes, bits per byte of 1.5 with a spread of 0.3 between documents."""
    sizes = np.round(np.exp(draw.normal(7, 1, n))) + 1
    return sizes * draw.normal(1.5, 0.3, n), sizes


def _beta(draw: np.random.Generator, mean: float, correlation: float, n: int) -> Array:
    if correlation == 0 or mean in (0.0, 1.0):
        return np.full(n, mean)
    scale = (1 - correlation) / correlation
    return draw.beta(mean * scale, (1 - mean) * scale, n)


def covers_mean(draw: np.random.Generator, items: Items, accuracy: float, correlation: float) -> bool:
    """Whether the interval of an accuracy covers the true one, which is within 10 % of ``accuracy`` or 1 - accuracy.

    It is drawn anew in each set: at a fixed one, the coverage of any interval of whole numbers jumps with n.
    """
    truth = accuracy + draw.uniform(-0.1, 0.1) * min(accuracy, 1 - accuracy)
    interval = intervals.mean(correct(draw, items, truth, correlation), items.clusters).interval
    return interval is not None and interval[0] <= truth <= interval[1]


def covers_difference(
    draw: np.random.Generator, items: Items, differ: float, difference: float, correlation: float
) -> bool:
    a, b = two_models(draw, items, differ, difference, correlation)
    interval = paired.of_items(a, b, items.clusters).interval
    return interval is not None and interval[0] <= difference <= interval[1]


def covers_ratio(draw: np.random.Generator, n: int) -> bool:
    bits, sizes = documents(draw, n)
    spread = intervals.bootstrap_ratio(bits, sizes, seed=int(draw.integers(1 << 30)), resamples=300)
    return spread is not None and spread[1][0] <= 1.5 <= spread[1][1]


def covers_ratio_difference(draw: np.random.Generator, n: int) -> bool:
    bits, sizes = documents(draw, n)
    better = bits - sizes * draw.normal(0.02, 0.05, n)
    interval = paired.of_ratios(bits, better, sizes).interval
    return interval is not None and interval[0] <= -0.02 <= interval[1]


@dataclass(frozen=True)
class Task:
    """A task of an average: its items, true accuracy, chance and correlation."""

    items: Items
    accuracy: float
    chance: float = 0.0
    correlation: float = 0.0


def covers_average(draw: np.random.Generator, tasks: Sequence[Task]) -> bool:
    truths = [task.accuracy + draw.uniform(-0.1, 0.1) * min(task.accuracy, 1 - task.accuracy) for task in tasks]
    scores = [
        averages.rescaled(
            intervals.mean(correct(draw, task.items, truth, task.correlation), task.items.clusters), task.chance
        )
        for task, truth in zip(tasks, truths, strict=True)
    ]
    truth = np.mean([(truth - task.chance) / (1 - task.chance) for task, truth in zip(tasks, truths, strict=True)])
    interval = averages.average(scores).interval
    return interval is not None and interval[0] <= truth <= interval[1]


def differences(
    draw: np.random.Generator, tasks: Sequence[Task], differ: float, difference: float = 0.0
) -> list[paired.Difference]:
    """Compare two models on several tasks."""
    pairs = [two_models(draw, task.items, differ, difference, task.correlation) for task in tasks]
    return [paired.of_items(a, b, task.items.clusters) for task, (a, b) in zip(tasks, pairs, strict=True)]


def covers_average_difference(
    draw: np.random.Generator, tasks: Sequence[Task], differ: float, difference: float
) -> bool:
    interval = paired.average(differences(draw, tasks, differ, difference)).interval
    return interval is not None and interval[0] <= difference <= interval[1]


def names_a_winner(draw: np.random.Generator, tasks: Sequence[Task], differ: float) -> bool:
    """Whether a comparison without any true difference names a winner: of a task or of their average."""
    rows = differences(draw, tasks, differ)
    if len(rows) > 1:
        rows.append(paired.average(rows))
    adjusted = paired.holm([row.p for row in rows])
    return any(row.verdict(p) != "no difference shown" for row, p in zip(rows, adjusted, strict=True))


def detectable(draw: np.random.Generator, items: Items, differ: float, correlation: float, *, sets: int) -> list[float]:
    """The smallest detectable difference that each of several comparisons prints."""
    rows = [
        paired.of_items(*two_models(draw, items, differ, 0.0, correlation), items.clusters).detectable()
        for _ in range(sets)
    ]
    return [row for row in rows if row is not None]


def detects(draw: np.random.Generator, items: Items, differ: float, correlation: float, difference: float) -> bool:
    """Whether a comparison with this true difference names the better model."""
    row = paired.of_items(*two_models(draw, items, differ, difference, correlation), items.clusters)
    return row.verdict(row.p) == "B better"
