"""Counts of collectives that a rank gives to the agent, and who is behind by them."""

import threading
import time
from pathlib import Path

import pytest

from smalti.track import collectives
from smalti.track.collectives import behind


def test_a_rank_answers_while_its_main_thread_waits(tmp_path: Path) -> None:
    count = 1
    collectives.answer_requests(tmp_path, 1, lambda: {"0": count})
    assert collectives.ask(tmp_path, [1], 5.0) == {1: {"0": 1}}
    count = 2
    assert collectives.ask(tmp_path, [1], 5.0) == {1: {"0": 2}}


def test_ranks_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    never = threading.Event()
    collectives.answer_requests(tmp_path, 0, lambda: {"0": 1} if never.wait(60) else {})
    collectives.answer_requests(tmp_path, 1, lambda: {"0": 1})
    began_s = time.monotonic()
    assert collectives.ask(tmp_path, [0, 1, 2], 0.5) == {1: {"0": 1}}
    assert time.monotonic() - began_s < 5
    never.set()


@pytest.mark.parametrize(
    ("counts", "ranks"),
    [
        ({0: {"0": 5}, 1: {"0": 5}}, []),
        ({0: {"0": 5}, 1: {"0": 4}, 2: {"0": 5}}, [1]),
        ({0: {"0": 9, "c": 0}, 1: {"0": 8, "c": 1}}, [1]),
        ({0: {"0": 9, "a": 3}, 1: {"0": 9, "a": 3}, 2: {"0": 9, "b": 2}, 3: {"0": 9, "b": 3}}, [2]),
        ({0: {}, 1: {}}, []),
        ({}, []),
    ],
)
def test_ranks_with_fewer_collectives_are_behind(counts: dict[int, dict[str, int]], ranks: list[int]) -> None:
    assert behind(counts) == ranks
