"""The ledger of real runs with kills: the sum is wall time x ranks, by the clock of the test."""

import os
import signal
import time
from pathlib import Path

import pytest
import toy_run
from forked_command import start

from smalti.base.clock import seconds_of
from smalti.config.load import dump
from smalti.track.events import read_events
from smalti.track.goodput import BUCKETS, ledger, read_history
from smalti.track.progress import read_slots, slot_file

pytestmark = pytest.mark.slow


def _wait_for_step(folder: Path, attempt: int, step: int) -> int:
    """Wait until rank 1 of an attempt has finished a step; return its process."""
    path = slot_file(folder / "logs" / f"attempt-{attempt}", 0)
    end_s = time.monotonic() + 60
    while not (found := [slot for slot in read_slots(path) if slot.rank == 1 and slot.step >= step]):
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)
    return found[0].pid


def test_kills_of_a_rank_and_of_the_whole_command(tmp_path: Path) -> None:
    config = toy_run.config(
        tmp_path, "dense", parallel={"ranks": 2, "threads": 1}, duration="240step", checkpoint={"every": "40step"}
    )
    (recipe := tmp_path / "recipe.yaml").write_text(dump(config))
    folder = Path(config.run_folder)
    command = start("train", str(recipe))
    kills_s = [_kill(_wait_for_step(folder, 0, 60))]
    _wait_for_step(folder, 1, 140)
    kills_s.append(_kill(command.pid))
    command.finish()
    time.sleep(1.0)
    code, output = start("train", str(recipe)).finish()
    assert code == 0, output

    result = ledger(read_history(folder, time.time()))
    assert result is not None
    times_s = [time_s for event in read_events(folder) if (time_s := seconds_of(event["time"]))]
    assert sum(result.seconds.values()) == pytest.approx(2 * (times_s[-1] - times_s[0]), rel=5e-3)
    assert [each.at_s for each in result.interruptions] == [pytest.approx(time_s, abs=2.0) for time_s in kills_s]
    assert [each.event.get("event") for each in result.interruptions] == ["rank_died", None]
    for each in result.interruptions:
        assert each.resumed_step in (each.step // 40 * 40, each.step // 40 * 40 - 40)  # or it was still being written
    assert [each.by_itself for each in result.interruptions] == [True, False]
    assert result.seconds["idle"] > 2 * 1.0
    used = ("train", "data_wait", "checkpoint", "lost_work", "init", "detect", "restart", "idle")
    assert all(result.seconds[bucket] > 0 for bucket in used), result.seconds
    assert all(result.seconds[bucket] == 0 for bucket in BUCKETS if bucket not in used), result.seconds


def _kill(process: int) -> float:
    os.kill(process, signal.SIGKILL)
    return time.time()
