"""The watchdog counts signs of life within a long phase as progress."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smalti.base import clock
from smalti.fleet.agent.watchdog import Limits, Watchdog
from smalti.track.progress import Phase, ProgressWriter, slot_file


def test_a_long_phase_that_beats_is_no_hang(tmp_path: Path, monkeypatch: Any) -> None:
    now_s = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    path = slot_file(tmp_path, 0)
    writers = [ProgressWriter(path, local_rank=rank, local_ranks=2, rank=rank) for rank in range(2)]
    ranks: Any = [SimpleNamespace(rank=rank, code=None, is_stopped=False) for rank in range(2)]
    watchdog = Watchdog(Limits(10.0, 600.0), path)
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
