"""Proof: 95 % intervals cover the truth in 93 to 97 % of simulated sets; without one, at most 5 % name a winner."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simulated_scores as simulated
from simulated_scores import Items, Task, equal, independent, unequal

ITEMS = {
    "50 items": independent(50),
    "200 items": independent(200),
    "1000 items": independent(1000),
    "5 clusters of 40": equal(5, 40),
    "10 clusters of 10": equal(10, 10),
    "20 clusters of 10": equal(20, 10),
    "60 clusters of 10": equal(60, 10),
    "20 unequal clusters": unequal(20, 10),
    "57 unequal clusters": unequal(57, 10),
    "40 passages of 4": unequal(40, 4, spread=0.4),
}
AVERAGES = {
    "one task": [Task(independent(200), 0.3, 0.25)],
    "6 tasks": [
        Task(independent(n), p, 0.25) for n, p in zip((100, 150, 200, 300, 500, 1000), (0.3,) * 6, strict=True)
    ],
    "16 tasks": [Task(independent(40 + 20 * k), 0.1 + 0.05 * k) for k in range(16)],
    "clustered tasks": [Task(equal(10, 10), 0.3, 0.25, 0.1), Task(unequal(20, 10), 0.5, 0.25, 0.2)] * 3,
}
AVERAGES_OF_FEW = {
    "20 categories of 3": [Task(independent(3), 0.3)] * 20,
    "20 tasks of 30": [Task(independent(30), 0.7, 0.25)] * 20,
    "tasks of 10 to 400": [Task(independent(n), 0.3) for n in (10, 20, 50, 100, 200, 400)],
    "10 tasks of 3 beside one of 1000": [Task(independent(3), 0.5)] * 10 + [Task(independent(1000), 0.01)],
    "10 tasks of 3 beside 5 of 300": [Task(independent(3), 0.4)] * 10 + [Task(independent(300), 0.95)] * 5,
    "20 single items beside 5 tasks of 300": [Task(independent(1), 0.5)] * 20 + [Task(independent(300), 0.95)] * 5,
}
"""Tasks of few items; their paired differences are too wide."""
SAMPLE = ("50 items", "20 clusters of 10")
"""Shapes of which make test simulates a few hundred sets."""
ENOUGH, ENOUGH_PAIRED = 5, 30
"""Right and wrong answers (differing answers, of a pair) that a set must have, divided by the design effect of its
clusters. With fewer, whole numbers and empty clusters move the coverage of any interval."""


def design_effect(items: Items, correlation: float) -> float:
    return 1 + (sum(size * size for size in items.sizes) / items.n - 1) * correlation


def correlations(items: Items) -> tuple[float, ...]:
    return (0.0,) if items.clusters is None else (0.0, 0.1, 0.3)


def share(cases: int, seed: int, holds: Callable[..., bool], *shape: Any) -> float:
    draw = np.random.default_rng(seed)
    return float(np.mean([holds(draw, *shape) for _ in range(cases)]))


def test_eval_statistics_cover_means(proof, record):
    cases, rates = proof(short=400, full=10_000), {}
    is_sample = cases < 1000
    for name, items in ITEMS.items():
        if is_sample and name not in SAMPLE:
            continue
        for accuracy in (0.1, 0.5) if is_sample else (0.02, 0.1, 0.5, 0.9):
            for correlation in correlations(items)[-1:] if is_sample else correlations(items):
                rate = share(cases, 1, simulated.covers_mean, items, accuracy, correlation)
                fewer = items.n * min(accuracy, 1 - accuracy) / design_effect(items, correlation)
                rates[f"{name}, accuracy {accuracy}, correlation {correlation}"] = [rate, round(fewer, 1)]
    record("eval_statistics", {"cases": cases, "means": rates})
    check(rates, ENOUGH, cases)


@pytest.mark.slow
def test_eval_statistics_cover_paired_differences(proof, record):
    cases, rates, winners = proof(short=400, full=10_000), {}, {}
    is_sample = cases < 1000
    for name, items in ITEMS.items():
        if is_sample and name not in SAMPLE:
            continue
        for differ in (0.4,) if is_sample else (0.02, 0.1, 0.4):
            for correlation in correlations(items)[-1:] if is_sample else correlations(items):
                shape = f"{name}, {differ} differ, correlation {correlation}"
                fewer = round(items.n * differ / design_effect(items, correlation), 1)
                for difference in (0.0, differ / 2):
                    rate = share(cases, 2, simulated.covers_difference, items, differ, difference, correlation)
                    rates[f"{shape}, difference {difference}"] = [rate, fewer]
                task = [Task(items, 0.5, 0, correlation)]
                winners[shape] = share(cases, 3, simulated.names_a_winner, task, differ)
    record("eval_statistics", {"paired": rates, "winners": winners})
    check(rates, ENOUGH_PAIRED, cases)
    assert max(winners.values()) <= bound(0.05, cases)


@pytest.mark.slow
def test_eval_statistics_cover_averages_and_documents(proof, record):
    cases, rates, winners = proof(short=40, full=10_000), {}, {}
    for name, tasks in list(AVERAGES.items())[: None if cases > 40 else 2]:
        rates[f"average of {name}"] = share(cases, 4, simulated.covers_average, tasks)
        rates[f"difference of the average of {name}"] = share(
            cases, 5, simulated.covers_average_difference, tasks, 0.3, 0.05
        )
        winners[name] = share(cases, 6, simulated.names_a_winner, tasks, 0.3)
    for name, tasks in list(AVERAGES_OF_FEW.items())[: None if cases > 40 else 0]:
        rates[f"average of {name}"] = share(cases, 4, simulated.covers_average, tasks)
    for n in (20, 50, 200)[: None if cases > 40 else 1]:
        few = max(cases // 5, 20)  # each has 300 resamples
        rates[f"bits per byte of {n} documents"] = share(few, 7, simulated.covers_ratio, n)
        rates[f"difference of bits per byte of {n} documents"] = share(few, 8, simulated.covers_ratio_difference, n)
    record("eval_statistics", {"averages": rates, "winners_of_suites": winners})
    check({name: [rate, ENOUGH] for name, rate in rates.items()}, ENOUGH, max(cases // 5, 20))
    assert max(winners.values()) <= bound(0.05, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["200 items", "20 clusters of 10"])
def test_eval_statistics_detect_the_smallest_detectable_difference(name, proof, record):
    """A true difference of the size that is printed (its mean over sets) has a winner in 80 % of the sets."""
    cases, items, correlation = proof(short=40, full=10_000), ITEMS[name], correlations(ITEMS[name])[-1]
    detectable = float(np.mean(simulated.detectable(np.random.default_rng(9), items, 0.4, correlation, sets=200)))
    power = share(cases, 10, simulated.detects, items, 0.4, correlation, detectable)
    record("eval_statistics", {f"power, {name}": power})
    assert power == pytest.approx(0.8, abs=0.04 + 3 * 0.4 / cases**0.5)


def check(rates: dict[str, list[float]], enough: float, cases: int) -> None:
    """Shapes with enough answers cover 93 to 97 %, the others at least 86 %; fewer cases, up to two standard errors of
    that less. Seeds are fixed, so a rate is always the same."""
    noise = 0 if cases >= 10_000 else 2 * (0.93 * 0.07 / cases) ** 0.5
    low = {
        name: rate for name, (rate, answers) in rates.items() if rate < (0.93 if answers >= enough else 0.86) - noise
    }
    high = {name: rate for name, (rate, answers) in rates.items() if rate > 0.97 + noise and answers >= enough}
    assert not low, low
    assert not high, high


def bound(rate: float, cases: int) -> float:
    return rate if cases >= 10_000 else rate + 3 * (rate / cases) ** 0.5
