"""The schedule: exact shares, counts and the inverse, against brute force; skips, segments, forks, digests."""

import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import UserError
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.order.schedule import MAX_SOURCES, Schedule, build_schedule
from smalti.data.order.spans import Span


def data(*stages: dict[str, Any], seq_len: int = 8, **more: Any) -> DataConfig:
    names = sorted({name for stage in stages for name in {**stage["weights"], **(stage.get("weights_end") or {})}})
    return DataConfig(sources={name: name for name in names}, seq_len=seq_len, stages=stages, **more)


@st.composite
def configs(draw: st.DrawFn) -> tuple[DataConfig, RunLength]:
    """Up to 7 sources, 5 stages, ramps of weights and batches, seq_len 4 or 8, stages down to one step."""
    names = "abcdefg"[: draw(st.integers(1, 7))]
    edges = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=5)))
    weight = st.one_of(st.integers(1, 9), st.floats(0.001, 1).map(lambda x: round(x, 6)))
    stages = []
    for end in edges:
        mine = draw(st.sets(st.sampled_from(names), min_size=1))
        stage: dict[str, Any] = {"until": f"{end}step", "weights": {name: draw(weight) for name in sorted(mine)}}
        if draw(st.integers(0, 3)) == 0:
            other = draw(st.sets(st.sampled_from(names), min_size=1))
            stage["weights_end"] = {name: draw(weight) for name in sorted(other)}
        if draw(st.integers(0, 3)) == 0:
            stage["seq_len"] = 4
        stages.append(stage)
    stages[-1]["until"] = "1run"
    cuts = sorted(draw(st.sets(st.integers(1, edges[-1]), max_size=3)) - {edges[-1]})
    batches = tuple((cut, 8 * draw(st.integers(1, 30))) for cut in (0, *cuts))
    return data(*stages), RunLength(edges[-1], batches)


@pytest.mark.slow
@pytest.mark.proof
@given(configs())
def test_batches_hold_rounded_shares_and_no_prefix_is_off_by_one(
    made: tuple[DataConfig, RunLength],
) -> None:
    schedule = build_schedule(*made)
    source, ordinal, segment = schedule.locate(np.arange(schedule.total_positions))
    n = len(schedule.sources)
    spans = list(schedule.spans)
    current, seen, exact, at = 0, np.zeros(n, dtype=np.int64), [Fraction(0)] * n, 0
    for step in range(schedule.total_steps):
        if len(spans) > 1 and spans[1].start_step <= step:
            spans.pop(0)
        if schedule.segment(step) != current:
            current, seen, exact = schedule.segment(step), np.zeros(n, dtype=np.int64), [Fraction(0)] * n
        assert schedule.first_position(step) == at
        assert schedule.rows(step) == spans[0].rows == made[1].batch_tokens(step) // schedule.seq_len(step)
        batch = slice(at, at + spans[0].rows)
        assert (segment[batch] == current).all()
        counts = np.bincount(source[batch], minlength=n)
        for which in range(n):
            share = Fraction(spans[0].rows * spans[0].weights[which], schedule.unit)
            assert share // 1 <= counts[which] <= -(-share // 1)
            exact[which] += share
            mine = ordinal[batch][source[batch] == which]
            assert np.array_equal(mine, np.arange(seen[which], seen[which] + counts[which]))
        seen += counts
        at += spans[0].rows
        assert all(abs(int(c) - e) < 1 for c, e in zip(seen, exact, strict=True))
        assert schedule.counts(step + 1).tolist() == seen.tolist()
        assert step % 13 or schedule.shares(step + 1) == exact
    assert at == schedule.first_position(schedule.total_steps) == schedule.total_positions


@pytest.mark.slow
@pytest.mark.proof
@given(configs(), st.data())
def test_the_inverse_finds_every_position(made: tuple[DataConfig, RunLength], drawn: st.DataObject) -> None:
    config, length = made
    total = build_schedule(config, length).total_positions
    edge = st.integers(0, total)
    pairs = drawn.draw(st.lists(st.tuples(edge, edge), max_size=3), label="skip")
    skip = tuple((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])
    schedule = build_schedule(config.model_copy(update={"skip": skip}), length)
    positions = np.arange(total)
    source, ordinal, segment = schedule.locate(positions)
    for which, number in set(zip(source.tolist(), segment.tolist(), strict=True)):
        here = (source == which) & (segment == number)
        assert np.array_equal(schedule.position_of(which, number, ordinal[here]), positions[here])
        assert schedule.ordinals_end(length.total_steps, number)[which] == ordinal[here].max() + 1
    steps = schedule.step_of(positions)
    assert all(schedule.segment(step) == segment[steps == step][0] for step in np.unique(steps)[::17].tolist())
    picked = drawn.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=30), label="picked")
    for one, whole in zip(schedule.locate(picked), (source, ordinal, segment), strict=True):
        assert np.array_equal(one, whole[picked])


@pytest.mark.slow
@pytest.mark.proof
@given(configs(), st.data())
def test_skips_leave_out_what_stood_there_and_keep_every_batch(
    made: tuple[DataConfig, RunLength], drawn: st.DataObject
) -> None:
    """Against lists: each source of a segment yields its ordinals in order, less those of each span in turn."""
    config, length = made
    plain = build_schedule(config, length)
    total = plain.total_positions
    skip: tuple[tuple[int, int], ...] = ()
    for _ in range(drawn.draw(st.integers(1, 3))):
        begin = drawn.draw(st.integers(0, total - 1))
        skip = (*skip, (begin, drawn.draw(st.integers(begin + 1, total))))
    schedule = build_schedule(config.model_copy(update={"skip": skip}), length)
    source, ordinal, segment = plain.locate(np.arange(total))
    found = schedule.locate(np.arange(total))
    assert np.array_equal(found[0], source)
    assert np.array_equal(found[2], segment)
    for which, number in set(zip(source.tolist(), segment.tolist(), strict=True)):
        slots = np.flatnonzero((source == which) & (segment == number))
        left = list(range(slots.size * (len(skip) + 1)))
        for begin, end in skip:
            low, high = np.searchsorted(slots, [begin, end])
            del left[low:high]
        assert found[1][slots].tolist() == left[: slots.size]
        assert ordinal[slots].tolist() == list(range(slots.size))


def test_skipped_ordinals_and_spans_outside_are_refused() -> None:
    config, length = data({"weights": {"a": 1, "b": 1}}), RunLength(10, ((0, 80),))
    schedule = build_schedule(config.model_copy(update={"skip": ((10, 20),)}), length)
    assert schedule.locate(np.arange(10, 20))[1].min() == 10
    with pytest.raises(UserError, match="sequence 7 of source 'a' in segment 0") as caught:
        schedule.position_of(0, 0, [7])
    assert "data.skip" in str(caught.value)
    with pytest.raises(UserError, match="all that this run reads"):
        schedule.position_of(0, 0, [55])
    for wrong in ((5, 5), (9, 3), (0, 101)):
        with pytest.raises(UserError, match=r"data\.skip\[0\]"):
            build_schedule(config.model_copy(update={"skip": (wrong,)}), length)


@pytest.mark.slow
@pytest.mark.proof
@given(configs(), st.integers(1, 200))
def test_a_longer_run_begins_alike(made: tuple[DataConfig, RunLength], more: int) -> None:
    config, length = made
    last = config.stages[-1].model_copy(update={"weights_end": None, "weights": config.stages[-1].weights})
    stages = (*config.stages[:-1], last)
    if {name for stage in stages for name in stage.names} != set(config.sources):
        return
    config = config.model_copy(update={"stages": stages})
    longer = RunLength(length.total_steps + more, length.batches)
    one, other = build_schedule(config, length), build_schedule(config, longer)
    positions = np.arange(one.total_positions)
    for mine, theirs in zip(one.locate(positions), other.locate(positions), strict=True):
        assert np.array_equal(mine, theirs)
    assert one.digest == other.digest
    assert one.past_digest(length.total_steps) == other.past_digest(length.total_steps)


@pytest.mark.slow
@pytest.mark.proof
@given(configs(), configs(), st.data())
def test_past_digests_agree_where_the_choices_do(
    made: tuple[DataConfig, RunLength], other: tuple[DataConfig, RunLength], drawn: st.DataObject
) -> None:
    """Behind a fork, and for the schedule that it came from."""
    one = build_schedule(*made)
    forks = min(one.total_steps - 1, other[1].total_steps - 1)
    if forks < 1:
        return
    step = drawn.draw(st.integers(1, forks), label="fork")
    two = build_schedule(*other, parent=one, fork_step=step)
    end = min(one.total_steps, two.total_steps)
    for at in sorted({1, step // 2 + 1, step, (step + end) // 2, end}):
        agree = one.first_position(at) == two.first_position(at) and _names(one, at) == _names(two, at)
        assert agree or at > step
        assert (one.past_digest(at) == two.past_digest(at)) == agree
    n = two.total_positions
    source, ordinal, segment = two.locate(np.arange(n))
    for which, number in set(zip(source.tolist(), segment.tolist(), strict=True)):
        mine = ordinal[(source == which) & (segment == number)]
        assert np.array_equal(mine, np.arange(mine.size))
    for at in range(1, two.total_steps + 1, 7):
        errors = [abs(int(c) - s) for c, s in zip(two.counts(at), two.shares(at), strict=True)]
        assert max(errors) < 1


@st.composite
def _skips(draw: st.DrawFn, begin: int, end: int) -> tuple[tuple[int, int], ...]:
    edge = st.integers(begin, end)
    pairs = draw(st.lists(st.tuples(edge, edge), max_size=3))
    return tuple((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])


@pytest.mark.exhaustive
@pytest.mark.proof
@given(configs(), configs(), st.booleans(), st.data())
def test_past_digests_agree_where_the_choices_do_with_skips(
    made: tuple[DataConfig, RunLength], other: tuple[DataConfig, RunLength], forked: bool, drawn: st.DataObject
) -> None:
    """Of a schedule and a fork of it, whatever reaches over the fork; and of two that only look alike."""
    config, length = made
    skip = drawn.draw(_skips(0, build_schedule(config, length).total_positions), label="skip")
    one = build_schedule(config.model_copy(update={"skip": skip}), length)
    forks = min(one.total_steps - 1, other[1].total_steps - 1)
    if forks < 1:
        return
    step = drawn.draw(st.integers(1, forks), label="step")
    if forked:
        begun = one.first_position(step)
        mine = tuple(pair for pair in skip if pair[0] < begun)
        plain = build_schedule(other[0].model_copy(update={"skip": mine}), other[1], parent=one, fork_step=step)
        later = drawn.draw(_skips(begun, plain.total_positions), label="later")
        two = build_schedule(
            other[0].model_copy(update={"skip": (*mine, *later)}), other[1], parent=one, fork_step=step
        )
    else:
        # the same steps as far as ``step``, another mixture behind them: what a skip over the edge means differs
        stage = {"until": f"{step}step", "weights": {"a": 2, "b": 1}}
        same = [dict(stage), dict(stage)]
        futures = [{"weights": {"a": 1, "b": drawn.draw(st.integers(1, 9))}} for _ in same]
        steps = RunLength(step + 50, ((0, 80),))
        pairs = [drawn.draw(_skips(0, 10 * step + 500)) for _ in range(drawn.draw(st.integers(1, 2)))]
        one, two = (
            build_schedule(data(first, future, skip=pair), steps)
            for first, future, pair in zip(same, futures, (pairs[0], pairs[-1]), strict=True)
        )
    end = min(one.total_steps, two.total_steps)
    for at in sorted({1, step // 2 + 1, step, (step + end) // 2, end}):
        agree = one.first_position(at) == two.first_position(at) and _names(one, at) == _names(two, at)
        assert agree or at > step or not forked
        assert (one.past_digest(at) == two.past_digest(at)) == agree
    n = two.total_positions
    source, ordinal, segment = two.locate(np.arange(n))
    for which, number in set(zip(source.tolist(), segment.tolist(), strict=True)):
        here = (source == which) & (segment == number)
        assert (np.diff(ordinal[here]) > 0).all()
        assert np.array_equal(two.position_of(which, number, ordinal[here]), np.flatnonzero(here))


def test_a_skip_over_the_fork_leaves_out_what_it_did_where_it_had_begun() -> None:
    """A skip beyond the fork applies to the sequences that are there after the fork."""
    length = RunLength(20, ((0, 80),))
    config = data({"until": "4step", "weights": {"a": 1}}, {"weights": {"a": 1, "b": 1}}, skip=((10, 150),))
    base = build_schedule(config, length)
    turned = data({"weights": {"a": 4, "c": 1}}, skip=((10, 150),))
    turned = turned.model_copy(update={"sources": {**turned.sources, "b": turned.sources["a"]}})
    new = build_schedule(turned, length, parent=base, fork_step=4)
    before = np.arange(40)
    assert np.array_equal(new.locate(before)[1], base.locate(before)[1])
    assert new.past_digest(4) == base.past_digest(4)
    ordinals = {
        name: new.locate(np.arange(200))[1][new.locate(np.arange(200))[0] == new.sources.index(name)] for name in "ac"
    }
    taken = base.counts(15)[0] - 10
    assert ordinals["a"].tolist() == [*range(10), *range(10 + taken, 10 + taken + len(ordinals["a"]) - 10)]
    assert ordinals["c"][0] == 11 * 2, "positions 40 to 150 hold 22 of it"
    shorter = build_schedule(turned, RunLength(6, ((0, 80),)), parent=base, fork_step=4)
    assert shorter.total_positions == 60, "a pair that has begun may end behind a shorter run"


def _names(schedule: Schedule, step: int) -> list[tuple[str, int, int]]:
    source, ordinal, segment = schedule.locate(np.arange(schedule.first_position(step)))
    lengths = [schedule.segments[number].seq_len for number in segment.tolist()]
    names = [schedule.sources[which] for which in source.tolist()]
    rows = schedule.step_of(np.arange(schedule.first_position(step))).tolist()
    return list(zip(names, ordinal.tolist(), [a * 10_000 + b for a, b in zip(lengths, rows, strict=True)], strict=True))


def test_the_digest_names_all_that_chooses() -> None:
    length = RunLength(100, ((0, 80),))
    stages = ({"until": "50step", "weights": {"a": 3, "b": 1}}, {"weights": {"a": 1, "b": 2}})
    base = build_schedule(data(*stages), length)
    others = [
        build_schedule(data({**stages[0], "until": "51step"}, stages[1]), length),
        build_schedule(data({**stages[0], "weights": {"a": 2, "b": 1}}, stages[1]), length),
        build_schedule(data({**stages[0], "weights": {"a": 3, "c": 1}}, {"weights": {"a": 1, "c": 2}}), length),
        build_schedule(data({**stages[0], "seq_len": 16}, stages[1]), length),
        build_schedule(data(*stages, skip=((30, 31),)), length),
        build_schedule(data(*stages), RunLength(100, ((0, 80), (20, 160)))),
        build_schedule(data(*stages), length, parent=base, fork_step=10),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 8
    same = data({**stages[0], "until": "20step"}, {**stages[0], "weights": {"a": 6, "b": 2}}, stages[1])
    assert build_schedule(same, RunLength(150, ((0, 80),))).digest == base.digest


def test_a_changed_skip_before_a_fork_is_refused() -> None:
    length = RunLength(100, ((0, 80),))
    config = data({"weights": {"a": 3, "b": 1}}, skip=((30, 31), (600, 700)))
    base = build_schedule(config, length)
    new = build_schedule(config.model_copy(update={"skip": ((30, 31), (900, 910))}), length, parent=base, fork_step=50)
    assert new.past_digest(50) == base.past_digest(50)
    assert new.skip == ((30, 31), (900, 910))
    with pytest.raises(UserError, match=r"data\.skip before position 500"):
        build_schedule(config.model_copy(update={"skip": ((30, 33),)}), length, parent=base, fork_step=50)


def test_order_of_names_in_the_config_does_not_matter() -> None:
    length = RunLength(10, ((0, 80),))
    one = build_schedule(data({"weights": {"a": 0.3, "b": 0.7}}), length)
    turned = DataConfig(sources={"b": "b", "a": "a"}, seq_len=8, stages=[{"weights": {"b": 0.7, "a": 0.3}}])
    other = build_schedule(turned, length)
    assert (one.digest, one.sources) == (other.digest, other.sources)
    assert np.array_equal(one.locate(np.arange(100))[0], other.locate(np.arange(100))[0])


def test_more_sources_than_an_index_can_tell_apart_are_refused() -> None:
    n = MAX_SOURCES + 1
    with pytest.raises(UserError, match=r"a run cannot have 32,768 sources\nallowed: at most 32,767"):
        Schedule([f"s{number}" for number in range(n)], [Span(0, 1, 8, (1,) * n, 0)], 1)


def test_positions_and_steps_outside_the_run_are_refused() -> None:
    schedule = build_schedule(data({"weights": {"a": 1}}), RunLength(10, ((0, 8),)))
    for position in (-1, 10):
        with pytest.raises(UserError, match=f"position {position} is outside"):
            schedule.locate([0, position])
    for step in (-1, 11):
        with pytest.raises(UserError, match=f"step {step}"):
            schedule.counts(step)


def test_ranks_and_microbatches_see_about_the_mixture() -> None:
    weights = {**dict.fromkeys("abcdefghij", 0.001), "x": 0.6, "y": 0.39}
    schedule = build_schedule(data({"weights": weights}), RunLength(100, ((0, 1024 * 8),)))
    for step in (0, 7, 50):
        source, _, _ = schedule.locate(np.arange(step * 1024, (step + 1) * 1024))
        for part in np.split(source, 64):
            assert np.abs(np.bincount(part, minlength=12)[10:] - [9.6, 6.24]).max() < 2.5
            assert np.bincount(part, minlength=12)[:10].sum() <= 2


@pytest.mark.parametrize("ramp", [False, True])
def test_trillions_of_tokens_need_no_more_than_tables(ramp: bool, record) -> None:
    """12T tokens in steps of 1,024 x 4,096, five sources with awkward weights, two stages."""
    weights = {"a": 0.123456, "b": 0.234567, "c": 0.345678, "d": 0.0123, "e": 0.28399}
    later = {"a": 0.4, "b": 0.223456, "c": 0.1, "d": 0.2, "e": 0.076544}
    first: dict[str, Any] = {"until": "0.6run", "weights": weights}
    config = data({**first, "weights_end": later} if ramp else first, {"weights": later}, seq_len=4096)
    length = RunLength(12_000_000_000_000 // (1024 * 4096), ((0, 1024 * 4096),))
    begun = time.process_time()
    schedule = build_schedule(config, length)
    built_s = time.process_time() - begun
    positions = np.random.default_rng(5).integers(0, schedule.total_positions, 10_000)
    source, ordinal, _ = schedule.locate(positions)
    for index in range(5):
        here = source == index
        assert np.array_equal(schedule.position_of(index, 0, ordinal[here]), positions[here])
    edges = [span.start_step for span in schedule.spans]
    for step in {1, *edges[1:], *(edge + 1 for edge in edges), 2_000_000, schedule.total_steps}:
        errors = [abs(c - s) for c, s in zip(schedule.counts(step).tolist(), schedule.shares(step), strict=True)]
        assert max(errors) < 1
    stored = sum(len(table.counts) for table in schedule.lookup.tables)
    assert stored < (20_000 if ramp else 1000)
    name = "schedule_of_12T_tokens" + ("_with_a_ramp" if ramp else "")
    record(name, {"built_s": round(built_s, 4), "steps": schedule.total_steps, "table_rows": stored})
