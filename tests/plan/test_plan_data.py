"""Epochs, repeats, requests, bytes and dollars: against sums done by hand."""

import math
from fractions import Fraction

import pytest

from smalti.plan.data import (
    REPEATS_HALF_LIFE,
    EpochCounts,
    Reading,
    SourceCounts,
    StageCounts,
    effective_tokens,
    plan_data,
)

HALF = (Fraction(1, 2), Fraction(1, 2))
READING = Reading(ranks=8, first_batch_sequences=1024, concurrency=32, requests_per_s=1000)


def stage(start: int, end: int, sequences: tuple[int, ...], *, seq_len: int = 100, segment: int = 0) -> StageCounts:
    return StageCounts(f"{start}-{end}", start, end, seq_len, segment, HALF, HALF, sequences)


def source(name: str, *sequences: int, **more: object) -> SourceCounts:
    return SourceCounts(name, n_tokens=1000, segments=tuple(map(EpochCounts, sequences)), **more)


def test_worth_of_repeats():
    assert effective_tokens(10, 0.5, 0.5) == 5
    assert effective_tokens(10, 1) == 10
    # up to four epochs nearly as good as new; after R* repeats each of them was worth 1 - 1/e in the mean
    assert effective_tokens(1, 4) == pytest.approx(3.7265, abs=1e-3)
    assert effective_tokens(1, 1 + REPEATS_HALF_LIFE) == pytest.approx(1 + REPEATS_HALF_LIFE * (1 - 1 / math.e))
    assert effective_tokens(1, 1e6) == pytest.approx(1 + REPEATS_HALF_LIFE)
    assert effective_tokens(10, 0) == 0
    # half of a source four times is that half, three times repeated
    assert effective_tokens(10, 2, 0.5) == pytest.approx(5 * effective_tokens(1, 4))


def test_epochs_go_on_over_stages_of_one_seq_len():
    plan = plan_data([source("a", 10), source("b", 10)], [stage(0, 5, (6, 40)), stage(5, 9, (6, 2))], READING)
    a, b = plan.sources
    assert (a.epochs, b.epochs) == pytest.approx((1.2, 4.2))
    assert (a.tokens, plan.tokens, plan.steps) == (1200, 5400, 9)
    assert a.share_frac == pytest.approx(12 / 54)
    assert a.unique_frac == b.unique_frac == 1
    assert a.restart_tokens == 0
    assert [share.epochs_after for share in plan.stages[1].shares] == pytest.approx([1.2, 4.2])
    assert [share.epochs for share in plan.stages[1].shares] == pytest.approx([0.6, 0.2])
    assert plan.above(16) == ()
    assert plan.above(4) == (b,)
    assert plan.repeats_text(b, 4).startswith("source 'b' is repeated for 4.20 epochs (passes 4 in stage 5-9); a token")


def test_a_stage_that_alone_is_above_is_named():
    plan = plan_data([source("a", 10)], [stage(0, 5, (10,)), stage(5, 9, (500,))], READING)
    assert "51.00 epochs (50.00 in stage 5-9 alone)" in plan.repeats_text(plan.sources[0], 16)


def test_another_seq_len_draws_anew():
    stages = [stage(0, 5, (5,)), stage(5, 9, (2,), seq_len=250, segment=1)]
    (a,) = plan_data([source("a", 10, 4)], stages, READING).sources
    assert a.epochs == pytest.approx(1.0)
    # two halves drawn independently meet three quarters of the source
    assert a.unique_frac == pytest.approx(0.75)
    assert a.restart_tokens == pytest.approx(250)
    assert a.effective_tokens == pytest.approx(750 * effective_tokens(1, 4 / 3))
    assert a.worth_frac < 1
    # what was exhausted before is repeated anyway: nothing is due to the change
    (b,) = plan_data([source("b", 10, 4)], [stages[0], stage(5, 9, (4,), seq_len=250, segment=1)], READING).sources
    assert b.unique_frac == 1
    assert b.restart_tokens == 0


def test_what_is_skipped_goes_through_a_source_too():
    skipping = StageCounts("0", 0, 5, 100, 0, HALF, HALF, (8,), passed=(20,))
    (a,) = plan_data([source("a", 10)], [skipping], READING).sources
    assert (a.epochs, a.taken_epochs, a.tokens) == (2.0, 0.8, 800)
    assert a.effective_tokens == pytest.approx(800)
    assert a.restart_tokens == 0


def test_a_source_of_any_size_is_not_drawn_anew_without_a_change_of_seq_len():
    huge = SourceCounts("v", 10**30, (EpochCounts(10**28), EpochCounts(10**27)))
    (a,) = plan_data([huge], [stage(0, 5, (3,))], READING).sources
    assert a.restart_tokens == 0
    assert a.worth_frac == 1


def test_requests_bytes_and_dollars():
    plain = source("a", 10, token_bytes=2, stored_bytes=1 << 30, index_bytes=500, block_bytes=1024, payload_bytes=1000)
    (a,) = (plan := plan_data([plain], [stage(0, 5, (1_000_000,))], READING)).sources
    assert a.requests == 1_000_000
    # 101 tokens of 2 bytes at any place of blocks of 500 tokens: 100 of 500 places cut them in two
    assert a.read_bytes == pytest.approx(1_000_000 * 1.2 * 1024)
    assert plan.requests == 1_000_001
    assert plan.requests_usd == pytest.approx(0.4, abs=1e-5)
    assert plan.storage_usd_per_month == pytest.approx(0.023)
    assert plan.egress_usd == 0
    abroad = Reading(8, 1024, 32, 1000, usd_per_gib_egress=0.09)
    assert plan_data([plain], [stage(0, 5, (10,))], abroad).egress_usd == pytest.approx(0.09 * (12288 + 500) / 2**30)
    packed = SourceCounts("p", 1000, (EpochCounts(10, ranges_per_sequence=3.0, padding_frac=0.1),))
    plan = plan_data([packed], [stage(0, 5, (10,))], READING)
    assert plan.sources[0].requests == 30
    assert plan.padding_frac == pytest.approx(0.1)


def test_costs_are_not_known_where_a_layout_is_not():
    foreign = source("mds", 10, layout_known=False)
    plan = plan_data([source("a", 10), foreign], [stage(0, 5, (6, 6))], READING)
    assert [one.requests for one in plan.sources] == [6, None]
    assert (plan.requests, plan.stored_bytes, plan.first_batch_s, plan.egress_usd) == (None,) * 4
    assert plan.sources[1].epochs == pytest.approx(0.6)
    assert plan.to_json()["requests"] is None


def test_expected_blocks_of_a_read_are_those_counted():
    payload, seq_len = 37, 100
    touched = [(begin % payload + seq_len) // payload + 1 for begin in range(payload)]
    counted = source("a", 10, token_bytes=1, block_bytes=1, payload_bytes=payload)
    plan = plan_data([counted], [stage(0, 5, (1000,))], READING)
    assert plan.sources[0].read_bytes == pytest.approx(1000 * sum(touched) / payload, abs=1)


def test_start_up_is_bounded_by_rounds_or_by_the_limit_of_the_job():
    # 128 ranges on each of 8 ranks, 32 at a time: 4 rounds; 1024 at 1000/s last longer
    assert plan_data([source("a", 10)], [stage(0, 1, (1,))], READING).first_batch_s == pytest.approx(0.05 + 1.024)
    fast = Reading(8, 1024, 32, 1e6)
    assert plan_data([source("a", 10)], [stage(0, 1, (1,))], fast).first_batch_s == pytest.approx(0.05 + 4 * 0.05)
    assert plan_data([source("a", 10)], [stage(0, 1, (1,))], READING).tokens_per_s_limit == 100_000


def test_json_has_plain_values():
    import json

    value = plan_data([source("a", 10)], [stage(0, 5, (6,))], READING).to_json()
    assert json.dumps(value)
    assert "era" in value["stages"][0]
    assert value["stages"][0]["shares"][0]["weight"] == "1/2"
    assert value["requests"] == 7
