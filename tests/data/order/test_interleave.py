"""Counts of steps compared with brute force, also where a greedy choice would fail."""

import random

import pytest

from smalti.data.order import interleave as module
from smalti.data.order.interleave import Cycle, SpanWeights, interleave

pytestmark = pytest.mark.slow


def _spans(rng: random.Random) -> tuple[list[SpanWeights], int]:
    """Up to 8 sources, absent from some of up to 6 spans; spans of a step to 400, batches of 1 to 40 rows."""
    n_sources = rng.randint(1, 8)
    unit = rng.randint(max(n_sources, 2), rng.choice([12, 60, 200]))
    spans = []
    for _ in range(rng.randint(1, 6)):
        there = [source for source in range(n_sources) if rng.random() < 0.7] or [rng.randrange(n_sources)]
        cuts = [0, *sorted(rng.sample(range(1, unit), len(there) - 1)), unit]
        weights = [0] * n_sources
        for index, source in enumerate(there):
            weights[source] = cuts[index + 1] - cuts[index]
        n_steps = rng.randint(1, rng.choice([6, 40, 400]))
        spans.append(SpanWeights(n_steps, rng.randint(1, rng.choice([4, 40])), tuple(weights)))
    return spans, unit


def _rows(segments: list[Cycle]) -> list[list[int]]:
    rows: list[list[int]] = []
    for segment in segments:
        assert segment.start_step == len(rows)
        table = segment.counts.tolist()
        rows += [table[step % len(table)] for step in range(segment.n_steps)]
    return rows


def _check(spans: list[SpanWeights], unit: int) -> list[list[int]]:
    rows = _rows(interleave(spans, unit))
    shares, counts = [0] * len(spans[0].weights), [0] * len(spans[0].weights)
    left = iter(rows)
    for span in spans:
        for _ in range(span.n_steps):
            row = next(left)
            assert sum(row) == span.rows
            for source, (count, weight) in enumerate(zip(row, span.weights, strict=True)):
                share = span.rows * weight
                assert count in (share // unit, -(-share // unit))
                shares[source] += share
                counts[source] += count * unit
                assert abs(shares[source] - counts[source]) < unit
    assert next(left, None) is None
    return rows


def test_every_step_is_rounded_and_no_prefix_is_off_by_one(proof) -> None:
    rng = random.Random(5)
    for _ in range(proof(400, 100_000)):
        _check(*_spans(rng))


def test_remainders_are_reassigned_where_a_source_is_absent_next() -> None:
    """Two of four sources wait out the second step: the remainder of the first must go to one of each pair."""
    rows = _check(
        [SpanWeights(1, 2, (1, 1, 1, 1)), SpanWeights(1, 1, (2, 0, 2, 0)), SpanWeights(1, 1, (0, 2, 0, 2))], 4
    )
    assert sum(rows[0][0::2]) == 1


@pytest.mark.parametrize("tail", [1, 8])
def test_a_tail_that_is_too_short_is_made_longer(tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TAIL_STEPS", tail)
    rng = random.Random(6)
    for _ in range(300):
        _check(*_spans(rng))


def test_ties_are_broken_by_later_deadlines() -> None:
    """By the next deadline alone this mixture fails in every period."""
    spans = [(3, 23, (0, 3, 37, 0, 93, 17, 1)), (6, 33, (45, 82, 0, 18, 0, 6, 0)), (20, 3, (0, 13, 0, 0, 18, 97, 23))]
    _check([SpanWeights(*span) for span in [*spans, (700, 30, (20, 25, 10, 0, 46, 50, 0))]], 151)


def test_equal_spans_are_one_and_the_end_changes_nothing() -> None:
    rng = random.Random(7)
    for _ in range(60):
        spans, unit = _spans(rng)
        whole = _check(spans, unit)
        last = spans[-1]
        cut = rng.randint(1, last.n_steps)
        assert (
            _rows(interleave([*spans[:-1], last._replace(n_steps=cut)], unit))
            == whole[: len(whole) - last.n_steps + cut]
        )
        if cut < last.n_steps:
            parts = [last._replace(n_steps=cut), last._replace(n_steps=last.n_steps - cut)]
            assert _rows(interleave([*spans[:-1], *parts], unit)) == whole
