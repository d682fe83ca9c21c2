"""Reading ahead: in order, for a number of seconds, within a number of bytes, and closed at once."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from smalti.base import clock
from smalti.train.read_ahead import ReadAhead, n_bytes


def ahead(read: Callable[[int], Any], last: int, **options: Any) -> ReadAhead[Any]:
    return ReadAhead(read, 0, last, **{"prefetch_s": 1.0, "prefetch_bytes": 1 << 30, "threads": 4, **options})


def test_steps_come_in_order_whatever_the_threads() -> None:
    def read(step: int) -> int:
        time.sleep(0.002 * (step * 7 % 5))
        return step

    for threads in (1, 2, 8):
        with ahead(read, 60, threads=threads) as batches:
            assert list(batches) == list(range(60))


def test_an_error_comes_at_its_turn() -> None:
    def read(step: int) -> int:
        if step == 3:
            raise ValueError("step 3")
        return step

    with ahead(read, 10) as batches:
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="step 3"):
            next(batches)


def test_waiting_for_a_batch_ends_when_it_is_ready_or_the_time_is_over() -> None:
    given = threading.Event()

    def read(step: int) -> int:
        if step == 1:
            given.wait(10)
        return step

    with ahead(read, 2) as batches:
        assert batches.wait(10)
        assert next(batches) == 0
        assert not batches.wait(0.01)
        assert not batches.has(1)
        assert batches.has(2)  # nothing comes after the last
        given.set()
        assert batches.wait(10)
        assert batches.has(1)
        assert next(batches) == 1


def test_a_reader_of_one_thread_is_called_step_by_step() -> None:
    called: list[int] = []
    running = 0

    def read(step: int) -> int:
        nonlocal running
        running += 1
        assert running == 1
        time.sleep(0.001)
        called.append(step)
        running -= 1
        return step

    with ahead(read, 20, threads=1) as batches:
        assert list(batches) == list(range(20))
    assert called == list(range(20))


def kept_ahead(monkeypatch: pytest.MonkeyPatch, step_s: float, **options: Any) -> int:
    """Return how many steps are read ahead for these step times."""
    now_s = [0.0]
    monkeypatch.setattr(clock, "now_s", lambda: now_s[0])
    called: list[int] = []

    def read(step: int) -> Any:
        called.append(step)
        return np.zeros(1000, np.uint8)

    with ahead(read, 10_000, **options) as batches:
        for _ in range(12):
            next(batches)
            now_s[0] += step_s
        end_s = time.monotonic() + 10
        while len(called) < 12 + batches.depth and time.monotonic() < end_s:
            time.sleep(0.01)
        time.sleep(0.02)  # no more comes
        assert len(called) == 12 + batches.depth
        return batches.depth


def test_so_many_seconds_are_kept_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_ahead(monkeypatch, 0.5, prefetch_s=14.8) == 30
    assert kept_ahead(monkeypatch, 20.0, prefetch_s=10.0) == 1


def test_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept_ahead(monkeypatch, 0.5, prefetch_s=100, prefetch_bytes=5000) == 5
    assert kept_ahead(monkeypatch, 0.5, prefetch_s=100, prefetch_bytes=1) == 1


def test_several_are_read_at_a_time_where_the_trainer_waits() -> None:
    """No read ends before three others have begun."""
    together = threading.Barrier(4, timeout=20)

    def read(step: int) -> int:
        together.wait()
        return step

    with ahead(read, 40, prefetch_s=1000.0) as batches:
        assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
        together.abort()


@pytest.mark.slow
def test_the_end_does_not_wait_for_a_read_that_hangs() -> None:
    hangs = threading.Event()

    def read(step: int) -> int:
        if step == 2:
            hangs.wait(30)
        return step

    begun_s = time.perf_counter()
    with ahead(read, 10) as batches:
        next(batches)
    assert time.perf_counter() - begun_s < 5
    hangs.set()


def test_a_read_under_way_is_interrupted_at_the_end() -> None:
    interrupted = threading.Event()
    with ahead(lambda step: step < 2 or interrupted.wait(30), 10, interrupt=interrupted.set) as batches:
        next(batches)
    assert interrupted.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_bytes_of_a_batch() -> None:
    class Rows:
        def __init__(self) -> None:
            self.tokens = np.zeros((4, 8), np.uint16)
            self.name = "x"

    assert n_bytes([Rows(), (np.zeros(3), None, 5)]) == 64 + 24
    assert n_bytes({"input_ids": np.zeros(10), "more": [{"mask": np.zeros(2)}]}) == 96


def test_what_cannot_be_weighed_weighs_nothing() -> None:
    class Odd:
        def __init__(self) -> None:
            self.me = self
            self.rows = np.zeros(4)

        @property
        def nbytes(self) -> int:
            raise RuntimeError("not known")

    class Round:
        def __init__(self) -> None:
            self.me = self
            self.rows = np.zeros(4)

    assert n_bytes(Odd()) == 0
    assert n_bytes(Round()) == 32
