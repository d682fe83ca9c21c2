"""The watchdog counts signs of life within a long phase as progress."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smalti.base import clock
from smalti.fleet.agent.evidence import Look
from smalti.fleet.agent.watchdog import Limits, Watchdog
from smalti.track.progress import Phase, ProgressWriter, read_slots, slot_file


def test_a_long_phase_that_beats_is_no_hang(tmp_path: Path, monkeypatch: Any) -> None:
    now_s = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    path = slot_file(tmp_path, 0)
    writers = [ProgressWriter(path, local_rank=rank, local_ranks=2, rank=rank) for rank in range(2)]
    ranks: Any = [SimpleNamespace(rank=rank, node=None, code=None, is_stopped=False) for rank in range(2)]
    watchdog = Watchdog(Limits(10.0, 600.0), partial(read_slots, path))
    for writer in writers:
        writer.enter(Phase.EVAL)

    def seconds_until_hang(beats: bool) -> int | None:
        nonlocal now_s
        for second in range(2000):
            now_s += 1.0
            for writer in writers if beats else ():
                writer.beat()
            if watchdog.look(ranks):
                return second
        return None

    assert seconds_until_hang(beats=True) is None
    assert seconds_until_hang(beats=False) == 599


def _slots(tmp_path: Path, n: int, opened: int) -> tuple[Path, list[ProgressWriter], Any]:
    path = slot_file(tmp_path, 0)
    writers = [ProgressWriter(path, local_rank=rank, local_ranks=n, rank=rank) for rank in range(opened)]
    ranks: Any = [
        SimpleNamespace(rank=rank, node=None, pid=100 + rank, code=None, is_stopped=False) for rank in range(n)
    ]
    return path, writers, ranks


def test_longer_rows_have_a_limit_of_their_own() -> None:
    limits = Limits(10.0, 600.0)
    for _ in range(3):
        limits.learn(Phase.FORWARD, 2.0, 128)
    assert limits.of(Phase.FORWARD, 128) == 10.0
    assert limits.of(Phase.FORWARD, 8192) == 600.0


def test_the_rows_of_a_step_are_in_its_slot(tmp_path: Path) -> None:
    path, (writer,), _ = _slots(tmp_path, 1, 1)
    writer.enter(Phase.DATA, step=3, row_tokens=128)
    writer.enter(Phase.FORWARD)
    assert [slot.row_tokens for slot in read_slots(path)] == [128]


def test_a_rank_without_a_slot_is_named_if_the_others_wait(tmp_path: Path, monkeypatch: Any) -> None:
    now_s = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    path, writers, ranks = _slots(tmp_path, 3, 2)
    watchdog = Watchdog(Limits(10.0, 30.0), partial(read_slots, path))
    for _ in range(100):  # the others train, so it is no hang
        now_s += 1.0
        for writer in writers:
            writer.enter(Phase.FORWARD)
        assert not watchdog.look(ranks)
    hung: list[Any] = []
    for _ in range(40):
        now_s += 1.0
        hung = hung or watchdog.look(ranks)
    assert watchdog.name(hung, ranks, Look({}, {})).rank == 2


def test_of_two_ranks_in_two_collectives_the_one_without_the_usual_one_is_named(tmp_path: Path) -> None:
    path, writers, ranks = _slots(tmp_path, 2, 2)
    for writer in writers:
        writer.enter(Phase.OPTIMIZER)
    hang = Watchdog(Limits(10.0, 600.0), partial(read_slots, path)).name(
        read_slots(path), ranks, Look({}, {0: {"0": 41, "7": 0}, 1: {"0": 40, "7": 1}})
    )
    assert (hang.rank, hang.why) == (1, "the others wait in a collective that it has not started")


_SAVER = {
    "faulthandler": """\
Thread 0x00007ff729ffb6c0 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 4287 in all_gather
  File "/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007ff729ffb123 (most recent call first):
""",
    "py-spy": """\
Thread 7 (idle): "checkpoint"
    all_gather (torch/distributed/distributed_c10d.py:4287)
    _bootstrap (threading.py:1002)
Thread 1 (idle): "MainThread"
""",
}
_WAITS = {
    "faulthandler": '  File "/lib/torch/distributed/distributed_c10d.py", line 4280 in all_reduce\n'
    '  File "/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap\n',
    "py-spy": "    all_reduce (torch/distributed/distributed_c10d.py:4280)\n",
}
_WORKS = {
    "faulthandler": '  File "/smalti/train/faults.py", line 54 in inject\n',
    "py-spy": "    inject (smalti/train/faults.py:54)\n",
}


@pytest.mark.parametrize("tool", ["faulthandler", "py-spy"])
def test_a_rank_whose_saver_alone_is_in_a_collective_does_not_wait_in_one(tool: str, tmp_path: Path) -> None:
    path, writers, ranks = _slots(tmp_path, 2, 2)
    for writer in writers:
        writer.enter(Phase.FORWARD)
    stacks = {0: _SAVER[tool] + _WAITS[tool], 1: _SAVER[tool] + _WORKS[tool]}
    hang = Watchdog(Limits(10.0, 600.0), partial(read_slots, path)).name(read_slots(path), ranks, Look(stacks, {}))
    assert (hang.rank, hang.why) == (1, "the others wait in a collective")


def test_a_rank_of_another_node_whose_stack_has_not_arrived_is_not_named(tmp_path: Path) -> None:
    path, writers, ranks = _slots(tmp_path, 2, 2)
    for writer in writers:
        writer.enter(Phase.FORWARD)
    watchdog, waits = Watchdog(Limits(10.0, 600.0), partial(read_slots, path)), _WAITS["faulthandler"]
    assert watchdog.name(read_slots(path), ranks, Look({0: waits, 1: ""}, {})).rank == 1, "it cannot even give a stack"
    ranks[1].node = "n2"
    assert watchdog.name(read_slots(path), ranks, Look({0: waits, 1: ""}, {})).rank is None
    assert watchdog.name(read_slots(path), ranks, Look({0: waits}, {})).rank is None
    assert watchdog.name(read_slots(path), ranks, Look({0: waits, 1: _WORKS["faulthandler"]}, {})).rank == 1


def test_parts_of_the_set_up_are_signs_of_life_whose_limit_is_learned_by_attempts_that_resume(
    tmp_path: Path, monkeypatch: Any
) -> None:
    now_s = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    limits = Limits(10.0, 600.0)

    def set_up(attempt: int, resumes: bool, parts: int) -> list[Any]:
        nonlocal now_s
        limits.resumes = resumes
        path, writers, ranks = _slots(tmp_path / str(attempt), 2, 2)
        watchdog = Watchdog(limits, partial(read_slots, path))
        for part in range(parts):
            for _ in range(30):
                now_s += 1.0
                assert not watchdog.look(ranks)
            for writer in writers if part < 4 else writers[:1]:  # rank 1 hangs in the fifth part
                writer.beat()
        if parts == 4:
            for writer in writers:
                writer.enter(Phase.DATA)
        hung: list[Any] = []
        for _ in range(700 if parts > 4 else 1):
            now_s += 1.0
            hung = hung or [watchdog.name(slots, ranks, Look({}, {})) for slots in [watchdog.look(ranks)] if slots]
        return hung

    for attempt in range(3):
        (tmp_path / str(attempt)).mkdir()
    assert not set_up(0, resumes=False, parts=4)
    assert limits.of(Phase.INIT) == 600.0, "an attempt without a checkpoint says nothing of one that loads it"
    assert not set_up(1, resumes=True, parts=4)
    assert limits.of(Phase.INIT) == 90.0
    (hang, *_) = set_up(2, resumes=True, parts=5)
    assert (hang.rank, hang.phase, hang.still_s) == (1, Phase.INIT, 90.0)


def test_phases_within_a_compilation_are_signs_of_life(tmp_path: Path) -> None:
    path, (writer,), _ = _slots(tmp_path, 1, 1)
    with writer.within(Phase.COMPILE):
        writer.enter(Phase.FORWARD)
        writer.enter(Phase.BACKWARD)
        (slot,) = read_slots(path)
    assert (slot.phase, slot.beats) == (Phase.COMPILE, 2)
