"""Every second of every rank is in exactly one bucket, whatever happened to the run."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.clock import seconds_of
from smalti.track import owner
from smalti.track.goodput import BUCKETS, Attempt, Fault, History, ledger, read_history
from smalti.track.progress import Phase, Progress, ProgressWriter, slot_file

T0 = 1_700_000_000.0
S = 1_000_000_000


def slot(rank: int, opened_s: float, phase: Phase, step: int = 0, **spent_s: float) -> Progress:
    """A slot that was opened at ``opened_s`` (since 1970), with seconds in its finished phases."""
    spent = [0] * 16
    for name, time_s in spent_s.items():
        spent[Phase[name.upper()]] = round(time_s * S)
    return Progress(
        rank, 100 + rank, phase, step, 9, 0, 5 * S + sum(spent), 5 * S, round(opened_s * S), (0,) * 4, tuple(spent)
    )


seconds = st.floats(0, 1e4)
phases = st.sampled_from(list(Phase))


@st.composite
def slots(draw: st.DrawFn, rank: int, start_s: float) -> Progress:
    spent = {phase.name.lower(): draw(seconds) for phase in Phase}
    return slot(rank, start_s + draw(st.floats(-10, 1e4)), draw(phases), draw(st.integers(0, 50)), **spent)


@st.composite
def histories(draw: st.DrawFn) -> History:
    attempts: list[Attempt] = []
    clock_s = T0
    for number in range(draw(st.integers(1, 5))):
        start_s = clock_s + draw(seconds) * bool(attempts)
        end_s = clock_s = start_s + draw(seconds)
        ranks = draw(st.integers(1, 3))
        known = tuple(draw(slots(rank, start_s)) for rank in range(ranks) if draw(st.booleans()))
        detected = draw(st.none() | seconds)
        fault = (
            Fault({"event": "rank_died"}, draw(st.floats(start_s, end_s)), detected) if draw(st.booleans()) else None
        )
        saves = draw(st.dictionaries(st.integers(0, 50), st.none() | seconds, max_size=3))
        from_step = draw(st.none() | st.integers(0, 50))
        wanted = ranks + draw(st.integers(0, 2))
        attempts.append(
            Attempt(
                number, start_s, end_s, ranks, wanted, known, from_step, saves, fault, draw(st.booleans()),
                draw(st.booleans()), draw(seconds),
            )
        )  # fmt: skip
    return History(tuple(attempts), draw(st.booleans()))


@given(history=histories())
def test_the_buckets_sum_to_wall_time_times_ranks(history: History) -> None:
    result = ledger(history)
    assert result is not None
    assert list(result.seconds) == list(BUCKETS)
    assert all(time_s >= -1e-6 for time_s in result.seconds.values()), result.seconds
    assert sum(result.seconds.values()) == pytest.approx(result.total_s, rel=1e-9, abs=1e-3)
    ends = zip(history.attempts, [*(a.start_s for a in history.attempts[1:]), history.attempts[-1].end_s], strict=True)
    wall = history.attempts[0].queued_s * history.attempts[0].wanted
    wall += sum((end_s - attempt.start_s) * attempt.wanted for attempt, end_s in ends)
    assert result.total_s == pytest.approx(wall, rel=1e-9, abs=1e-3)


def test_a_run_without_a_fault_is_train_and_its_overheads() -> None:
    own = slot(
        0, T0 + 1, Phase.END, 20, init=4, data=2, forward=3, backward=5, optimizer=1, other=1, eval=2, checkpoint=1
    )
    result = ledger(History((Attempt(0, T0, T0 + 21, 1, 1, (own,), 0, {20: 12.0}, None, is_done=True),)))
    assert result is not None
    assert {bucket: round(s, 6) for bucket, s in result.seconds.items() if s} == {
        "train": 10, "data_wait": 2, "checkpoint": 1, "eval": 2, "init": 6,
    }  # fmt: skip
    assert result.interruptions == ()


def test_a_hang_is_lost_work_detection_and_restart() -> None:
    """20 s of steps, 12 of them before the checkpoint; then a hang, noticed after 6 s; killed 1 s later."""
    hung = slot(1, T0 + 1, Phase.FORWARD, 9, init=4, forward=15)
    waiting = slot(0, T0 + 1, Phase.BACKWARD, 9, init=4, forward=15)
    fault = Fault({"event": "rank_hung", "rank": 1}, T0 + 31, 6.0)  # failed at 25
    first = Attempt(0, T0, T0 + 32, 2, 2, (waiting, hung), 0, {5: 12.0}, fault)
    again = tuple(slot(rank, T0 + 36, Phase.OTHER, 12, init=2, forward=10) for rank in range(2))
    second = Attempt(1, T0 + 35, T0 + 48, 2, 2, again, 5, {}, None, continues=True)
    result = ledger(History((first, second), is_running=True))
    assert result is not None
    got = {bucket: round(s / 2, 6) for bucket, s in result.seconds.items() if s}
    # first attempt: 20 s of work (5 to 25), of which 12 remain; restart: 1, the gap of 3, start and init 3
    assert got == {"train": 12 + 10, "lost_work": 8, "init": 5, "detect": 6, "restart": 1 + 3 + 3}
    (fault_of,) = result.interruptions
    assert (fault_of.detect_s, fault_of.lost_s, fault_of.restart_s) == pytest.approx((6, 8, 7))
    assert (fault_of.step, fault_of.resumed_step, fault_of.by_itself, fault_of.at_s) == (9, 5, True, T0 + 25)


def test_a_command_that_was_killed_is_idle_until_the_next() -> None:
    first = Attempt(0, T0, T0 + 10, 1, 1, (slot(0, T0, Phase.FORWARD, 8, forward=10),), 0, {}, Fault({}, T0 + 10, None))
    second = Attempt(
        1, T0 + 100, T0 + 110, 1, 1, (slot(0, T0 + 102, Phase.END, 8, init=1, forward=7),), 0, {}, None, True
    )
    result = ledger(History((first, replace(second, queued_s=30.0))))
    assert result is not None
    got = {bucket: round(s, 6) for bucket, s in result.seconds.items() if s}
    assert got == {"lost_work": 10, "idle": 60, "queue": 30, "restart": 3, "train": 7}


def test_ranks_that_are_missing_are_degraded() -> None:
    own = tuple(slot(rank, T0, Phase.END, 5, forward=10) for rank in range(3))
    result = ledger(History((Attempt(0, T0, T0 + 10, 3, 4, own, 0, {}, None, is_done=True),)))
    assert result is not None
    assert (result.seconds["degraded"], result.seconds["train"], result.total_s) == pytest.approx((10, 30, 40))


def _folder(root: Path, events: list[dict[str, Any]], processes: list[str]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for number, process in enumerate(processes):
        folder = root / "logs" / f"attempt-{number}"
        folder.mkdir(parents=True)
        where = root if number == 0 else folder
        (where / "provenance.json").write_text(json.dumps({"process": process}))
    return root


def test_it_is_read_from_the_folder(tmp_path: Path) -> None:
    events = [
        {"time": "2026-01-01T00:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 1, "ranks_wanted": 2},
        {"time": "2026-01-01T00:00:05.000Z", "attempt": 0, "event": "checkpoint_saved", "step": 3, "trained_s": 2.5},
        {"time": "2026-01-01T00:00:09.000Z", "attempt": 0, "event": "rank_hung", "rank": 0, "detected_s": 3.0},
        # the clock of the day was set forward by an hour
        {"time": "2026-01-01T01:00:10.000Z", "attempt": 0, "event": "attempt_ended", "code": 75, "seconds": 10.0},
        {"time": "2026-01-01T01:00:12.000Z", "attempt": 1, "event": "attempt_started", "ranks": 2},
        {"time": "2026-01-01T01:00:15.000Z", "attempt": 1, "event": "resumed", "step": 3},
    ]  # fmt: skip
    folder = _folder(tmp_path / "run", events, ["7-a", "7-a"])
    writer = ProgressWriter(slot_file(folder / "logs" / "attempt-0", 0), local_rank=0, local_ranks=1, rank=0)
    writer.enter(Phase.FORWARD, step=4)
    history = read_history(folder, seconds_of("2026-01-01T02:00:00.000Z") or 0.0)
    first, second = history.attempts
    assert (first.wanted, first.ranks, first.saves, first.from_step, first.last_step) == (2, 1, {3: 2.5}, 0, 4)
    assert (first.end_s - first.start_s, second.start_s - first.end_s) == (10, 2)
    assert (second.continues, second.from_step, second.end_s - second.start_s) == (True, 3, 3)
    assert not history.is_running
    assert first.slots[0].pid == os.getpid()


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    events = [
        {"time": "2026-01-01T02:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 1},
        {"time": "2026-01-01T02:00:10.000Z", "attempt": 0, "event": "attempt_ended", "code": 75, "seconds": 10.0},
        {"time": "2026-01-01T01:00:00.000Z", "attempt": 1, "event": "attempt_started", "ranks": 1},
        {"time": "2026-01-01T01:00:05.000Z", "attempt": 1, "event": "attempt_ended", "code": 0, "seconds": 5.0},
    ]
    result = ledger(read_history(_folder(tmp_path / "run", events, ["1-a", "1-b"]), T0))
    assert result is not None
    assert (result.total_s, result.seconds["idle"]) == (pytest.approx(15), 0)


def test_a_run_that_is_alive_is_counted_until_now(tmp_path: Path) -> None:
    events = [{"time": "2026-01-01T00:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 1}]
    folder = _folder(tmp_path / "run", events, ["1-a"])
    start_s = seconds_of("2026-01-01T00:00:00.000Z") or 0.0
    # a slot may change after the time was read: 19 s are before the heartbeat
    for now_s, alive in ((start_s + 60, True), (start_s + 19, True), (start_s + 3600, False)):
        status = {"state": "running", "attempt": 0, "heartbeat": "2026-01-01T00:00:20.000Z"}
        (folder / "status.json").write_text(json.dumps(status))
        history = read_history(folder, now_s)
        assert history.is_running is alive
        assert history.attempts[0].end_s == (max(now_s, start_s + 20) if alive else start_s + 20)


def test_a_killed_run_ends_with_its_last_sign_of_life(tmp_path: Path) -> None:
    """Its process is known to have ended: neither the clock nor a later event of a command adds to it."""
    events = [{"time": "2026-01-01T00:00:00.000Z", "attempt": 0, "event": "attempt_started", "ranks": 1}]
    events += [{"time": "2026-01-01T00:00:30.000Z", "attempt": 0, "event": kind}
               for kind in ("checkpoint_copied", "checkpoint_deleted")]  # fmt: skip
    folder = _folder(tmp_path / "run", events, ["1-a"])
    status = {"state": "running", "attempt": 0, "heartbeat": "2026-01-01T00:00:20.000Z"}
    (folder / "status.json").write_text(json.dumps(status))
    with subprocess.Popen(["sleep", "600"]) as process:
        (folder / owner.FILE_NAME).write_text(owner.note(process.pid))
        process.kill()
    start_s = seconds_of("2026-01-01T00:00:00.000Z") or 0.0
    history = read_history(folder, start_s + 60)
    assert not history.is_running
    assert history.attempts[0].end_s == start_s + 20


def test_a_folder_without_an_attempt_has_no_ledger(tmp_path: Path) -> None:
    assert ledger(read_history(tmp_path, T0)) is None
