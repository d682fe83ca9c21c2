import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.data import DataConfig
from smalti.data.mixture import UNIT, Schedule, Stage, build_schedule, quantise


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Up to 7 sources and 6 stages, some sources absent from some stages, some stages a few positions long."""
    n_sources, n_stages = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    unit = draw(st.integers(n_sources, 60))
    start, stages = 0, []
    for _ in range(n_stages):
        present = draw(st.lists(st.booleans(), min_size=n_sources, max_size=n_sources).filter(any))
        names = {str(i): draw(st.floats(0.01, 10)) for i, there in enumerate(present) if there}
        weights = quantise(names, unit)
        stages.append(Stage(start, tuple(weights.get(str(i), 0) for i in range(n_sources))))
        start += draw(st.one_of(st.integers(1, 12), st.integers(1, 400)))
    return Schedule([f"s{i}" for i in range(n_sources)], stages, start)


@pytest.mark.proof
@given(schedules())
def test_no_prefix_is_off_by_a_whole_sequence(schedule: Schedule) -> None:
    total = schedule.total_positions
    source, _ = schedule.locate(np.arange(total))
    counts = np.cumsum(source[:, None] == np.arange(len(schedule.sources)), axis=0)
    starts = [stage.start for stage in schedule.stages]
    per_position = np.array([stage.weights for stage in schedule.stages], dtype=np.int64)
    shares = np.cumsum(per_position[np.searchsorted(starts, np.arange(total), side="right") - 1], axis=0)
    assert np.abs(counts * schedule.unit - shares).max() < schedule.unit


@pytest.mark.proof
@given(schedules())
def test_absent_source_gets_at_most_the_one_sequence_that_it_was_owed(schedule: Schedule) -> None:
    ends = [*(stage.start for stage in schedule.stages[1:]), schedule.total_positions]
    for stage, end in zip(schedule.stages, ends, strict=True):
        got = schedule.counts(end) - schedule.counts(stage.start)
        share = schedule.shares(stage.start)
        for source, weight in enumerate(stage.weights):
            if weight == 0:
                assert got[source] <= 1
                assert got[source] == 0 or share[source].denominator > 1


@pytest.mark.proof
@given(schedules())
def test_counts_ordinals_and_inverse_agree_with_brute_force(schedule: Schedule) -> None:
    total = schedule.total_positions
    source, ordinal = schedule.locate(np.arange(total))
    seen = [0] * len(schedule.sources)
    for position in range(total):
        if position % 7 == 0:
            assert schedule.counts(position).tolist() == seen
        assert ordinal[position] == seen[source[position]]
        seen[source[position]] += 1
    assert schedule.counts(total).tolist() == seen
    for index in range(len(schedule.sources)):
        here = np.flatnonzero(source == index)
        assert np.array_equal(schedule.position_of(index, np.arange(here.size)), here)


@pytest.mark.proof
@given(schedules(), st.data())
def test_shares_are_those_that_the_weights_say(schedule: Schedule, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, schedule.total_positions))
    expected = [Fraction(0)] * len(schedule.sources)
    for at in range(position):
        stage = [stage for stage in schedule.stages if stage.start <= at][-1]
        expected = [e + Fraction(w, schedule.unit) for e, w in zip(expected, stage.weights, strict=True)]
    assert schedule.shares(position) == expected
    assert all(abs(c - s) < 1 for c, s in zip(schedule.counts(position).tolist(), expected, strict=True))


@pytest.mark.proof
@given(schedules(), st.integers(1, 500))
def test_a_longer_run_begins_alike(schedule: Schedule, more: int) -> None:
    longer = Schedule(schedule.sources, schedule.stages, schedule.total_positions + more)
    positions = np.arange(schedule.total_positions)
    assert np.array_equal(schedule.locate(positions)[0], longer.locate(positions)[0])
    assert schedule.digest == longer.digest


@pytest.mark.proof
@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(1e-9, 1e9), min_size=1, max_size=20))
def test_quantised_weights(weights: dict[str, float]) -> None:
    whole = quantise(weights, UNIT)
    assert sum(whole.values()) == UNIT
    assert min(whole.values()) >= 1
    total = sum(map(Fraction, map(str, weights.values())))
    exact = {name: Fraction(str(weight)) / total * UNIT for name, weight in weights.items()}
    if all(share >= 1 for share in exact.values()):
        assert all(abs(whole[name] - exact[name]) < 1 for name in weights)


def test_largest_remainder_and_minimum() -> None:
    assert quantise({"a": 0.8, "b": 0.2}, 5) == {"a": 4, "b": 1}
    assert quantise({"a": 1, "b": 1, "c": 1}, 65_536) == {"a": 21_846, "b": 21_845, "c": 21_845}
    assert quantise({"a": 1e12, "b": 1e-12, "c": 1e-12}, 65_536) == {"a": 65_534, "b": 1, "c": 1}
    with pytest.raises(UserError, match="3 sources in one stage"):
        quantise({"a": 1, "b": 1, "c": 1}, 2)


def _data(*stages: dict[str, object], seq_len: int = 8) -> DataConfig:
    names = sorted({name for stage in stages for name in stage["weights"]})
    return DataConfig(sources={name: name for name in names}, seq_len=seq_len, stages=stages)


def test_decimal_weights_are_exact() -> None:
    schedule = build_schedule(
        _data({"until": "0.5run", "weights": {"a": 0.67, "b": 0.33}}, {"weights": {"a": 2, "b": 1}}), 3000, 10
    )
    assert schedule.unit == 300
    assert [stage.weights for stage in schedule.stages] == [(201, 99), (200, 100)]
    assert schedule.counts(1500).tolist() == [1005, 495]
    assert schedule.counts(3000).tolist() == [2005, 995]


def test_awkward_weights_fall_back_to_65536_parts_in_all_stages() -> None:
    schedule = build_schedule(
        _data({"until": "0.5run", "weights": {"a": 0.123457, "b": 0.9}}, {"weights": {"a": 1, "b": 2}}), 3000, 10
    )
    assert schedule.unit == UNIT
    assert schedule.stages[1].weights == (21_845, 43_691)


@pytest.mark.parametrize(("until", "start"), [("0.8run", 800), ("30step", 300), ("3200tok", 400), ("3239tok", 400)])
def test_ends_of_stages_lie_on_steps(until: str, start: int) -> None:
    data = _data({"until": until, "weights": {"a": 1}}, {"weights": {"b": 1}})
    assert build_schedule(data, 1000, 10).stages[1].start == start


@pytest.mark.parametrize(
    ("untils", "message"),
    [
        (("0.001run",), r"data\.stages\[0\] ends at '0.001run', which is step 0"),
        (("50step", "0.5run"), r"data\.stages\[1\] ends at '0.5run', which is step 50"),
        (("101step",), "which is step 101"),
        (("100step",), r"data\.stages\[1\] ends at '1run'"),
    ],
)
def test_stage_without_a_step_or_beyond_the_run_is_refused(untils: tuple[str, ...], message: str) -> None:
    stages = [{"until": until, "weights": {"a": 1}} for until in untils]
    with pytest.raises(UserError, match=message):
        build_schedule(_data(*stages, {"weights": {"a": 1}}), 1000, 10)


def test_digest_follows_names_starts_and_weights_only() -> None:
    base = Schedule(["a", "b"], [Stage(0, (1, 2)), Stage(9, (2, 1))], 30)
    assert base.digest == Schedule(["a", "b"], [Stage(0, (1, 2)), Stage(9, (2, 1))], 90).digest
    others = [
        Schedule(["a", "c"], [Stage(0, (1, 2)), Stage(9, (2, 1))], 30),
        Schedule(["a", "b"], [Stage(0, (1, 2)), Stage(10, (2, 1))], 30),
        Schedule(["a", "b"], [Stage(0, (2, 1)), Stage(9, (2, 1))], 30),
        Schedule(["a", "b"], [Stage(0, (1, 2))], 30),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 5


def test_order_of_names_in_the_config_does_not_matter() -> None:
    one = build_schedule(_data({"weights": {"a": 0.3, "b": 0.7}}), 100, 10)
    data = DataConfig(sources={"b": "b", "a": "a"}, seq_len=8, stages=[{"weights": {"b": 0.7, "a": 0.3}}])
    other = build_schedule(data, 100, 10)
    assert (one.digest, one.sources) == (other.digest, other.sources)
    assert np.array_equal(one.locate(np.arange(100))[0], other.locate(np.arange(100))[0])


def test_positions_outside_the_run_are_refused() -> None:
    schedule = Schedule(["a"], [Stage(0, (1,))], 10)
    for position in (-1, 10):
        with pytest.raises(UserError, match=f"position {position} lies outside"):
            schedule.locate([0, position])
    with pytest.raises(UserError, match="position 11"):
        schedule.counts(11)


def test_trillions_of_tokens_need_no_more_than_tables(record) -> None:
    """12T tokens in sequences of 4,096, five sources whose weights need all 65,536 parts, three stages."""
    total = 12_000_000_000_000 // 4096
    rng = np.random.default_rng(5)
    weights = [quantise({str(i): float(w) for i, w in enumerate(rng.random(5))}, UNIT) for _ in range(3)]
    starts = (0, int(0.6 * total), int(0.9 * total))
    stages = [Stage(start, tuple(w.values())) for start, w in zip(starts, weights, strict=True)]
    begun = time.perf_counter()
    schedule = Schedule("abcde", stages, total)
    built_s = time.perf_counter() - begun
    positions = rng.integers(0, total, 10_000)
    source, ordinal = schedule.locate(positions)
    for index in range(5):
        here = source == index
        assert np.array_equal(schedule.position_of(index, ordinal[here]), positions[here])
    for position in (0, 1, starts[1] - 1, starts[1], starts[1] + 65_537, starts[2], 2_000_000_000, total):
        errors = [
            abs(c - s) for c, s in zip(schedule.counts(position).tolist(), schedule.shares(position), strict=True)
        ]
        assert max(errors) < 1
    stored = sum(table.segment.choice.size for table in schedule._tables)
    assert stored <= 3 * 3 * UNIT
    record("schedule_of_12T_tokens", {"built_s": round(built_s, 3), "table_slots": stored})
