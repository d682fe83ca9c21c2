"""Slots are read while they are written, survive their writer, and account for its whole time."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from smalti.track.progress import Phase, ProgressWriter, read_slots, slot_file


def test_a_slot_holds_rank_phase_step_and_times(tmp_path: Path) -> None:
    path = slot_file(tmp_path, 0)
    writer = ProgressWriter(path, local_rank=1, local_ranks=2, rank=5)
    (first,) = read_slots(path)
    assert (first.rank, first.pid, first.phase, first.step, first.phase_count) == (5, os.getpid(), Phase.INIT, 0, 0)
    writer.collectives = lambda: 3
    writer.enter(Phase.DATA, step=7)
    (second,) = read_slots(path)
    assert (second.phase, second.step, second.phase_count, second.collectives) == (Phase.DATA, 7, 1, 3)
    assert second.spent_ns[Phase.INIT] == second.began_ns - second.opened_ns
    assert second.in_phase_s(second.began_ns + 2_500_000_000) == 2.5
    ProgressWriter(path, local_rank=0, local_ranks=2, rank=4)
    assert [slot.rank for slot in read_slots(path)] == [4, 5]


def test_no_file_and_no_writer_are_no_slots(tmp_path: Path) -> None:
    assert read_slots(tmp_path / "absent") == []
    (tmp_path / "empty").touch()
    assert read_slots(tmp_path / "empty") == []


@given(phases=st.lists(st.sampled_from(Phase), max_size=30))
def test_the_times_of_the_phases_add_up(tmp_path_factory, phases: list[Phase]) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("slots") / "slots"
    writer = ProgressWriter(path, local_rank=0, local_ranks=1, rank=0)
    for phase in phases:
        writer.enter(phase)
    (slot,) = read_slots(path)
    assert sum(slot.spent_ns) == slot.began_ns - slot.opened_ns
    assert slot.phase_count == len(phases)


def test_work_is_a_rank_s_own_in_each_phase_and_no_waiting(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    writer = ProgressWriter(path, local_rank=0, local_ranks=1, rank=0)
    writer.enter(Phase.DATA)
    writer.wait_for_batch(True, 0.5)
    writer.wait_for_batch(False, 0.25)
    writer.enter(Phase.FORWARD)
    time.sleep(0.05)
    writer.enter(Phase.BACKWARD)
    _compute(0.03)
    writer.enter(Phase.OTHER)
    _compute(0.03)
    writer.enter(Phase.DATA)
    (slot,) = read_slots(path)
    assert slot.work_s(Phase.DATA) == 0.75
    assert slot.work_s(Phase.FORWARD) < 0.03
    assert 0.03 <= slot.work_s(Phase.BACKWARD) < 0.05
    assert slot.work_s(Phase.OPTIMIZER) == 0


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_phase_of_an_error_remains(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    writer = ProgressWriter(path, local_rank=0, local_ranks=1, rank=0)
    writer.enter(Phase.DATA)
    with writer.within(Phase.COMPILE):
        writer.enter(Phase.FORWARD)
        assert read_slots(path)[0].phase == Phase.COMPILE
    assert read_slots(path)[0].phase == Phase.DATA
    with suppress(RuntimeError), writer.within(Phase.CHECKPOINT):
        raise RuntimeError
    assert read_slots(path)[0].phase == Phase.CHECKPOINT
    writer.enter(Phase.OTHER)
    assert read_slots(path)[0].phase == Phase.OTHER


def test_a_reader_sees_no_half_written_slot(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    writer = ProgressWriter(path, local_rank=0, local_ranks=1, rank=0)
    done = threading.Event()

    def write() -> None:
        for step in range(1, 20_000):
            writer.collectives = lambda step=step: step  # type: ignore[misc]
            writer.enter(Phase(step % 2), step=step)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        (slot,) = read_slots(path)
        assert slot.step == slot.phase_count == slot.collectives or slot.phase_count == 0
    thread.join()


def test_a_slot_outlives_a_rank_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    child = os.fork()
    if child == 0:
        ProgressWriter(path, local_rank=0, local_ranks=1, rank=3).enter(Phase.BACKWARD, step=9)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (slot,) = read_slots(path)
    assert (slot.rank, slot.pid, slot.phase, slot.step) == (3, child, Phase.BACKWARD, 9)
