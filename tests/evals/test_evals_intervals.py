"""Intervals: against published values, by simulation, and at the edges."""

import numpy as np
import pytest

from smalti.base.errors import UserError
from smalti.evals.graders.intervals import bootstrap_ratio, verdict, wilson_interval


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
