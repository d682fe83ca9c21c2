"""Paired comparisons: against enumeration and naive versions, their symmetry, and Holm's correction."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.evals.statistics.paired import Difference, average, holm, of_items, of_ratios
from smalti.evals.statistics.student import quantile

ROWS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5)), min_size=2, max_size=12)


def test_the_error_is_that_of_the_differences() -> None:
    generator = np.random.default_rng(0)
    a = generator.normal(size=300)
    b = a + generator.normal(0.1, 0.2, size=300)
    difference = of_items(a, b)
    assert difference.value == pytest.approx((b - a).mean())
    assert difference.stderr == pytest.approx((b - a).std(ddof=1) / math.sqrt(300))
    assert difference.stderr < math.hypot(a.std(), b.std()) / math.sqrt(300) / 3
    assert difference.interval == pytest.approx(
        (
            difference.value - quantile(0.975, difference.df) * difference.stderr,
            difference.value + quantile(0.975, difference.df) * difference.stderr,
        )
    )
    assert difference.verdict(difference.p) == "B better"
    assert difference.verdict(difference.p, higher_is_better=False) == "A better"


def test_few_items_against_the_exact_test() -> None:
    """Over all answers of two models that differ on up to half of the items, no winner is named in more than 5 % where
    each differing item favours either one alike."""
    for n in (6, 12, 20):
        named = [
            (b, c)
            for b, c in itertools.product(range(n + 1), repeat=2)
            if b + c <= n
            and (row := of_items([1] * b + [0] * (n - b), [0] * b + [1] * c + [0] * (n - b - c))).p <= 0.05
            and row.differing == b + c
        ]
        for share in (0.1, 0.3, 0.5):
            rate = sum(
                math.comb(n, b) * math.comb(n - b, c) * (share / 2) ** (b + c) * (1 - share) ** (n - b - c)
                for b, c in named
            )
            assert rate <= 0.05, (n, share)


@pytest.mark.proof
@given(ROWS)
def test_swapping_the_models_negates_the_difference(rows: list[tuple[int, int, int]]) -> None:
    a, b, names = (list(column) for column in zip(*rows, strict=True))
    forward, backward = of_items(a, b, names), of_items(b, a, names)
    assert backward.value == -forward.value
    assert (backward.stderr, backward.df) == pytest.approx((forward.stderr, forward.df))
    assert backward.p == pytest.approx(forward.p)
    opposite = {"A better": "B better", "B better": "A better"}
    assert backward.verdict(backward.p) == opposite.get(forward.verdict(forward.p), "no difference shown")


@pytest.mark.slow
@pytest.mark.proof
@given(ROWS, st.randoms())
def test_the_order_of_items_does_not_matter(rows: list[tuple[int, int, int]], draw: random.Random) -> None:
    before, after = (
        of_items(*(list(column) for column in zip(*order, strict=True)))
        for order in (rows, draw.sample(rows, len(rows)))
    )
    assert (after.value, after.stderr, after.df) == pytest.approx((before.value, before.stderr, before.df))


@pytest.mark.proof
@given(ROWS)
def test_clusters_of_one_item_are_no_clusters(rows: list[tuple[int, int, int]]) -> None:
    a, b, _ = (list(column) for column in zip(*rows, strict=True))
    assert of_items(a, b, list(range(len(rows)))) == of_items(a, b)


@pytest.mark.slow
@pytest.mark.proof
@given(ROWS)
def test_an_item_on_which_both_agree_changes_only_n(rows: list[tuple[int, int, int]]) -> None:
    a, b, _ = (list(column) for column in zip(*rows, strict=True))
    before, after = of_items(a, b), of_items([*a, 1], [*b, 1])
    assert before.differing == after.differing
    assert after.value * after.n == pytest.approx(before.value * before.n)


def test_equal_answers_name_no_winner_and_keep_a_width() -> None:
    equal = of_items([1, 0] * 50, [1, 0] * 50)
    assert (equal.value, equal.p, equal.verdict(equal.p)) == (0, 1, "no difference shown")
    assert equal.interval is not None
    assert 0.01 < equal.interval[1] < 0.05
    assert of_items([0.5] * 9, [0.5] * 9).p == 1


def test_few_items_can_name_no_winner() -> None:
    for n in range(2, 6):
        assert of_items([0] * n, [1] * n).p > 0.05
        assert of_items([0.1] * n, [0.9 + i / 100 for i in range(n)]).p > 0.05
    assert of_items([0] * 12, [1] * 12).p < 0.04
    assert of_items([0, 1], [1, 1], ["a", "a"]).p == 1


def test_ratios_of_sums() -> None:
    generator = np.random.default_rng(5)
    n_bytes = generator.integers(100, 2000, 200).astype(float)
    a = n_bytes * generator.normal(1.5, 0.3, 200)
    b = a - n_bytes * generator.normal(0.02, 0.05, 200)
    difference = of_ratios(a, b, n_bytes)
    ratio = (b - a).sum() / n_bytes.sum()
    linear = np.sqrt(((b - a - ratio * n_bytes) ** 2).sum()) / n_bytes.sum()  # linearised variance of a ratio
    assert difference.value == pytest.approx(ratio)
    assert difference.stderr == pytest.approx(linear, rel=0.01)
    assert difference.verdict(difference.p, higher_is_better=False) == "B better"


def test_average_by_hand() -> None:
    rows = [Difference(0.2, 0.3, 0.03, 10, 50, 20), Difference(0.5, 0.4, 0.04, 20, 60, 30)]
    result = average(rows, [3, 1])
    assert (result.a, result.b) == pytest.approx((0.275, 0.325))
    parts = (0.75 * 0.03) ** 2, (0.25 * 0.04) ** 2
    assert result.stderr == pytest.approx(math.sqrt(sum(parts)))
    assert result.df == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 10 + parts[1] ** 2 / 20))
    assert rows[0].rescaled(0.25).value == pytest.approx(0.1 / 0.75)
    assert average(rows[:1]).p == pytest.approx(rows[0].p)


def test_holm_as_published() -> None:
    """Holm's steps by hand: 0.01 * 4, 0.02 * 3, 0.03 * 2 (kept at the largest so far), 0.04 * 1."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_scores_that_cannot_be_paired() -> None:
    with pytest.raises(UserError, match="2 scores cannot be paired with 3"):
        of_items([1, 0], [1, 0, 1])
    with pytest.raises(UserError, match="not a finite number"):
        of_items([1, 0], [1, math.nan])
