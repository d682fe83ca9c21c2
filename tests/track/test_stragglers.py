"""Ranks whose own work takes longer are named with node and phase; noise, few ranks and old slots name nobody."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.track.progress import WORK, Phase, Progress
from smalti.track.stragglers import Work, by_node, notes, slow_ranks, work_between


def _work(forward_s: float, backward_s: float = 0.2) -> Work:
    return dict(zip(WORK, (0.0, forward_s, backward_s, 0.05), strict=True))


def _slot(rank: int, step: int, work_s: tuple[float, ...], pid: int = 7) -> Progress:
    work_ns = tuple(round(seconds * 1e9) for seconds in work_s)
    return Progress(rank, pid, Phase.OTHER, step, 0, 0, 0, 0, 0, work_ns, (0,) * 16)


def test_the_slow_rank_is_named_with_node_and_phase() -> None:
    work = {rank: _work(0.1) for rank in range(8)} | {5: _work(0.3)}
    slow = slow_ranks(work)
    assert list(slow) == [5]
    (straggler,) = by_node(slow, work, ["a"] * 4 + ["b"] * 4)
    assert (straggler.node, straggler.rank, straggler.phase) == ("b", 5, Phase.FORWARD)
    assert straggler.factor == slow[5] == pytest.approx(0.55 / 0.35)
    assert straggler.node_factor == 1.0


def test_a_slow_node_is_one_straggler_with_its_ranks() -> None:
    work = {rank: _work(0.1) for rank in range(12)} | {4: _work(0.1, 0.5), 5: _work(0.1, 0.6), 6: _work(0.1, 0.5)}
    (straggler,) = by_node(slow_ranks(work), work, [f"n{rank // 4}" for rank in range(12)])
    assert (straggler.node, straggler.rank, straggler.ranks) == ("n1", 5, (4, 5, 6))
    assert straggler.phase == Phase.BACKWARD
    assert straggler.node_factor == pytest.approx(0.65 / 0.35)


@given(times_s=st.lists(st.floats(0.9, 1.1), min_size=1, max_size=32))
def test_noise_names_nobody(times_s: list[float]) -> None:
    assert slow_ranks({rank: _work(time_s) for rank, time_s in enumerate(times_s)}) == {}


def test_of_two_ranks_none_is_the_odd_one() -> None:
    assert slow_ranks({0: _work(0.1), 1: _work(9.0)}) == {}


def test_more_rows_than_others_are_no_fault() -> None:
    work = {0: _work(0.1), 1: _work(0.1), 2: _work(0.25)}
    assert list(slow_ranks(work)) == [2]
    assert slow_ranks(work, least_factor=1.25 * 2) == {}


def test_work_is_per_step_and_of_ranks_that_made_one() -> None:
    before = [_slot(rank, 10, (0, 1, 1, 1)) for rank in range(4)]
    after = [
        _slot(0, 20, (1, 2, 3, 1)),
        _slot(1, 10, (0, 1, 1, 1)),  # an old reading of another node's file
        _slot(2, 20, (9, 9, 9, 9), pid=8),  # started again
    ]
    assert work_between(before, after) == {0: dict(zip(WORK, map(pytest.approx, (0.1, 0.1, 0.2, 0.0)), strict=True))}


def test_an_event_in_words() -> None:
    event = {"event": "straggler", "step": 1200, "rank": 5, "node": "n1", "phase": "forward", "factor": 1.62345}
    event |= {"ranks": [4, 5]}
    assert notes([json.loads(json.dumps(event)), {"event": "eval"}]) == [
        "rank 5 (also 4) of n1 is slow: its own work in a step took 1.62 times as long as that of the median rank, by "
        "most in forward, at step 1,200"
    ]
