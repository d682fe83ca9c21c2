"""Intervals: against published values, by simulation, and at the edges."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.evals.statistics import clusters
from smalti.evals.statistics.intervals import Estimate, bootstrap_ratio, mean, verdict, wilson_interval
from smalti.evals.statistics.student import quantile


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17, table I, method 3: Wilson's score without continuity correction).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_and_has_width_at_the_ends() -> None:
    low, high = wilson_interval(20, 20)
    assert (1 - high, 1 - low) == pytest.approx(wilson_interval(0, 20))
    assert low < 1.0 == high


def test_wilson_covers_about_95_percent() -> None:
    generator = np.random.default_rng(0)
    hits = []
    for successes in generator.binomial(200, 0.1, size=2000):
        low, high = wilson_interval(int(successes), 200)
        hits.append(low <= 0.1 <= high)
    assert 0.93 < np.mean(hits) < 0.975


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (3, 2), (-1, 5)])
def test_no_share_no_interval(successes: int, n: int) -> None:
    with pytest.raises(UserError, match="not a share"):
        wilson_interval(successes, n)


def test_verdict_words() -> None:
    assert verdict((0.11, 0.2), 0.1) == "above chance"
    assert verdict((0.10, 0.2), 0.1) == "not above chance"
    assert verdict((0.01, 0.09), 0.1) == "below chance"


def test_bootstrap_of_a_constant_ratio_has_no_spread() -> None:
    sizes = np.array([1.0, 10.0, 100.0, 3.0])
    found = bootstrap_ratio(2.5 * sizes, sizes, seed=1)
    assert found is not None
    assert found[0] == pytest.approx(0, abs=1e-12)
    assert found[1] == pytest.approx((2.5, 2.5))


def test_bootstrap_error_is_that_of_the_ratio_estimator() -> None:
    generator = np.random.default_rng(3)
    sizes = generator.uniform(50, 150, 400)
    values = sizes * generator.normal(2.0, 0.3, 400)
    ratio = values.sum() / sizes.sum()
    linear = np.sqrt(((values - ratio * sizes) ** 2).sum()) / sizes.sum()  # linearised variance of a ratio
    found = bootstrap_ratio(values, sizes, seed=1, resamples=2000)
    assert found is not None
    assert found[0] == pytest.approx(linear, rel=0.1)
    assert found[1][0] < ratio < found[1][1]
    assert found == bootstrap_ratio(values, sizes, seed=1, resamples=2000)


def test_one_unit_has_no_spread_to_tell() -> None:
    assert bootstrap_ratio(np.array([1.0]), np.array([2.0]), seed=0) is None


def test_mean_of_independent_items() -> None:
    estimate = mean([1, 1, 0, 1, 0])
    assert estimate.stderr == pytest.approx(np.std([1, 1, 0, 1, 0], ddof=1) / np.sqrt(5))
    assert estimate.interval == wilson_interval(3, 5)
    assert estimate.to_score()["interval_method"] == "wilson 95 %"
    real = mean([0.2, 0.5, 0.9])
    assert real.interval is not None
    assert real.interval[1] - real.value == pytest.approx(4.302653 * np.std([0.2, 0.5, 0.9], ddof=1) / np.sqrt(3))
    assert mean([1]).interval == wilson_interval(1, 1)
    assert (mean([0.3]).interval, mean([0.3]).stderr) == (None, None)


def test_clustered_error_by_pairs_of_items() -> None:
    """Miller's formula, a sum over the pairs of a cluster, with equal sizes times the correction G / (G - 1)."""
    generator = np.random.default_rng(1)
    items, names = generator.integers(0, 2, 24).astype(float), np.repeat(np.arange(6), 4)
    deviations = items - items.mean()
    pairs = sum(deviations[i] * deviations[j] for i in range(24) for j in range(24) if i != j and names[i] == names[j])
    unclustered = (deviations**2).sum() / 24**2
    assert mean(items, list(names)).stderr == pytest.approx(np.sqrt((unclustered + pairs / 24**2) * 6 / 5))


def test_degrees_of_freedom_by_matrices() -> None:
    generator = np.random.default_rng(0)
    for n_clusters, correlation in ((2, 0.0), (5, 0.3), (12, 1.0)):
        sizes = generator.integers(1, 30, n_clusters).astype(float)
        scale = 1 / (1 - sizes / sizes.sum())
        residuals = np.eye(n_clusters) - np.outer(sizes, np.ones(n_clusters)) / sizes.sum()
        form = residuals.T @ np.diag(scale) @ residuals @ np.diag(sizes * (1 + (sizes - 1) * correlation))
        expected = np.trace(form) ** 2 / np.trace(form @ form)
        assert clusters._df_of_sizes(sizes, scale, correlation) == pytest.approx(expected)


SCORES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), min_size=2, max_size=12)


@pytest.mark.slow
@pytest.mark.proof
@given(SCORES, st.randoms())
def test_order_of_items_and_names_of_clusters_do_not_matter(rows: list[tuple[int, int]], draw: random.Random) -> None:
    shuffled = draw.sample(rows, len(rows))
    before = mean([value for value, _ in rows], [name for _, name in rows])
    after = mean([value for value, _ in shuffled], [f"passage {name}" for _, name in shuffled])
    assert (after.value, after.stderr, after.df) == pytest.approx((before.value, before.stderr, before.df))
    assert after.interval == pytest.approx(before.interval)


@pytest.mark.proof
@given(SCORES)
def test_clusters_of_one_item_are_no_clusters(rows: list[tuple[int, int]]) -> None:
    values = [value for value, _ in rows]
    assert mean(values, list(range(len(rows)))) == mean(values) == mean(values, [None] * len(rows))


@pytest.mark.proof
@given(SCORES)
def test_interval_contains_the_mean_and_stays_in_range(rows: list[tuple[int, int]]) -> None:
    estimate = mean([value for value, _ in rows], [name for _, name in rows])
    if estimate.interval is not None:
        assert 0 <= estimate.interval[0] <= estimate.value <= estimate.interval[1] <= 1
        assert estimate.interval[0] < estimate.interval[1]


def test_equal_items_of_a_cluster_count_as_one() -> None:
    values = [1, 0, 0, 1, 1, 0, 1, 1]
    repeated = mean(np.repeat(values, 5), list(np.repeat(np.arange(8), 5)))
    assert repeated.stderr == pytest.approx(mean(values).stderr)
    assert repeated.clusters == 8


def test_no_spread_between_clusters_is_not_certainty() -> None:
    assert mean([1] * 30, [0] * 10 + [1] * 10 + [2] * 10).interval == pytest.approx(
        wilson_interval(3, 3, quantile(0.975, 2))
    )
    one = mean([1, 0, 1], ["a", "a", "a"])
    assert (one.stderr, one.interval, one.clusters) == (None, None, 1)


def test_scores_can_be_read_back() -> None:
    for estimate in (mean([1, 0, 1]), mean([1, 0, 1, 1], [0, 0, 1, 2]), mean([0.5])):
        metric = {"metric": "score" if estimate.bounds is None else "accuracy"}
        assert Estimate.from_score(json.loads(json.dumps(metric | estimate.to_score()))) == estimate


@pytest.mark.parametrize("values", [[], [float("nan"), 1.0], [[1.0]]])
def test_no_mean(values: list[float]) -> None:
    with pytest.raises(UserError, match="not defined"):
        mean(values)
