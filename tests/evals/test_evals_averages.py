"""Averages of scores: by hand, against a naive version, and their properties."""

import math
from dataclasses import replace

import numpy as np
import pytest

from smalti.base.errors import UserError
from smalti.evals.statistics.averages import average, rescaled
from smalti.evals.statistics.intervals import Estimate, mean


def score(value: float, stderr: float | None, low: float, high: float) -> Estimate:
    return Estimate(value, stderr, (low, high), 100, "given")


def test_rescaled() -> None:
    assert rescaled(score(0.4, 0.03, 0.34, 0.46), 0.25) == replace(
        score(0.2, 0.04, 0.12, 0.28),
        interval=(pytest.approx(0.12), pytest.approx(0.28)),
        value=pytest.approx(0.2),
        bounds=(pytest.approx(-1 / 3), 1.0),
    )
    with pytest.raises(UserError, match="chance"):
        rescaled(score(0.4, 0.03, 0.34, 0.46), 1.0)


def test_average_by_hand() -> None:
    result = average([score(0.2, 0.03, 0.1, 0.3), score(0.6, 0.04, 0.5, 0.8)], [1, 3])
    assert result.value == pytest.approx(0.25 * 0.2 + 0.75 * 0.6)
    variances = [(99 * stderr**2 * 100 + (0.03**2 + 0.04**2) / 2 * 100) / 100**2 for stderr in (0.03, 0.04)]
    assert result.stderr == pytest.approx(math.sqrt(0.25**2 * variances[0] + 0.75**2 * variances[1]))
    assert result.stderr == pytest.approx(math.hypot(0.25 * 0.03, 0.75 * 0.04), rel=0.01)
    assert result.interval == pytest.approx((0.5 - math.hypot(0.025, 0.075), 0.5 + math.hypot(0.025, 0.15)))
    assert result.n == 200


def test_categories_of_one_item_have_the_interval_of_their_items() -> None:
    for values in ([0] * 4, [1] * 4):
        result = average([mean([value]) for value in values])
        assert (result.stderr, result.interval) == (0.0, pytest.approx(mean(values).interval))
    result = average([mean([value]) for value in [0, 1] * 10])
    assert result.stderr == pytest.approx(mean([0, 1] * 10).stderr)
    assert result.interval == pytest.approx((0.29, 0.71), abs=0.01)


def test_few_items_without_spread_do_not_narrow_an_average() -> None:
    """A score of three right answers of three has no standard error."""
    result = average([mean([1, 1, 1]), mean(np.arange(1000) < 500)])
    assert result.stderr == pytest.approx(math.sqrt((0.25 / 9 + 0.25 / 1000) / 4), rel=0.01)
    assert result.interval[0] < 0.53
    assert result.interval[1] > 0.81
    none_right = average([mean([0, 0, 0]), mean([0] * 5, [1, 1, 2, 2, 2])])
    assert (none_right.stderr, none_right.interval[0]) == (0.0, 0.0)
    assert none_right.interval[1] > 0.5


def test_an_average_of_one_is_that_score() -> None:
    for estimate in (mean([1, 0, 1, 1]), mean([1, 0, 1, 1, 0], [0, 0, 1, 2, 2])):
        result = average([estimate])
        assert (result.value, result.stderr) == (estimate.value, estimate.stderr)
        assert result.interval == pytest.approx(estimate.interval)


def test_an_average_of_averages_is_that_of_their_scores() -> None:
    parts = [mean(np.arange(n) < k) for n, k in ((50, 3), (80, 70), (40, 40), (60, 20))]
    nested = average([average(parts[:2]), average(parts[2:])])
    assert nested.interval == pytest.approx(average(parts).interval, rel=0.001)
    assert nested.stderr == pytest.approx(average(parts).stderr, rel=0.001)


def test_a_score_without_an_interval_leaves_the_average_without() -> None:
    result = average([score(0.2, 0.03, 0.1, 0.3), replace(score(0.6, None, 0, 1), interval=None)])
    assert (result.value, result.stderr, result.interval) == (0.4, None, None)


def test_scores_of_weight_0_are_left_out() -> None:
    none, all_, some = mean([0] * 10), mean([1] * 10), mean([1, 0, 1, 1])
    assert average([none, some], [1, 0]) == none
    assert average([none, some, all_], [2, 0, 2]) == average([none, all_])
    assert average([none, replace(some, interval=None)], [1, 0]).interval == none.interval


def test_few_items_do_not_borrow_the_smaller_variance_of_many() -> None:
    """One of three right, ten times, or one item each, beside tasks of hundreds of items that are nearly all right."""
    certain = [mean(np.arange(1000) < 990)] * 5
    for few in ([mean([1, 0, 0])] * 10, [mean([index % 3 == 0]) for index in range(30)]):
        assert average([*few, *certain]).stderr > 0.99 * average(few).stderr * len(few) / (len(few) + 5)


@pytest.mark.parametrize("weights", [[], [1.0], [0.0, 0.0], [1.0, -1.0], [1.0, math.inf]])
def test_weights_that_make_no_average(weights: list[float]) -> None:
    with pytest.raises(UserError, match="weight"):
        average([score(0.2, 0.03, 0.1, 0.3)] * 2, weights)
