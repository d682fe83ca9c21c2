"""Paired timing gives the ratio of two works, whichever is slower."""

import time

import pytest
from paired import paired, ratio_of


def test_ratio_of_two_sleeps():
    result = paired(lambda: time.sleep(0.004), lambda: time.sleep(0.001), names=("slow", "fast"), pairs=5)
    assert 1.5 < result.ratio < 8
    assert result.ratio_p10 <= result.ratio <= result.ratio_p90
    assert "slow / fast" in str(result)


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="at least 3"):
        paired(lambda: None, lambda: None, names=("a", "b"), pairs=2)


def test_the_spread_of_few_pairs_lies_within_them():
    ratio = ratio_of([2.0, 3.0], [1.0, 1.0], names=("slow", "fast"))
    assert 2.0 <= ratio.ratio_p10 <= ratio.ratio <= ratio.ratio_p90 <= 3.0
