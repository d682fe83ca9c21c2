"""The end of a run waits for its hooks."""

from types import SimpleNamespace
from typing import Any

import pytest

from smalti.track.progress import NoProgress
from smalti.train import hooks
from smalti.train.hooks import Hook, closing_hooks, wait_for_hooks
from smalti.train.signals import Stop


class Busy(Hook):
    """Busy for so many questions; a signal comes at one of them."""

    def __init__(self, times: int, signals: Any, stop_at: int | None = None) -> None:
        self.asked = 0
        self.times, self.signals, self.stop_at = times, signals, stop_at
        self.closed = False

    def is_busy(self, job: Any) -> bool:
        self.asked += 1
        if self.asked == self.stop_at:
            self.signals.requested = Stop.PREEMPTED
        return self.asked <= self.times

    def close(self, job: Any) -> None:
        self.closed = True


class OneRank:
    """A vote of this rank alone."""

    def start(self, *values: int) -> None:
        self.values = [*values, 0, 0]

    def result(self) -> list[int]:
        return self.values


@pytest.mark.parametrize(
    ("times", "stop_at", "stop", "asked"),
    [(0, None, Stop.NONE, 1), (3, None, Stop.NONE, 4), (9, 2, Stop.PREEMPTED, 3), (0, 1, Stop.NONE, 1)],
)
def test_a_stop_counts_only_while_a_hook_is_busy(
    times: int, stop_at: int | None, stop: Stop, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_POLL_S", 0.0)
    signals: Any = SimpleNamespace(requested=Stop.NONE)
    hook = Busy(times, signals, stop_at)
    job: Any = SimpleNamespace(
        hooks=[hook], state=SimpleNamespace(step=5, progress=NoProgress()), length=None, status=lambda state: None
    )
    vote: Any = OneRank()
    assert wait_for_hooks(job, signals, vote) == stop
    assert hook.asked == asked


def test_hooks_are_closed_after_an_error() -> None:
    hook = Busy(0, None)
    job: Any = SimpleNamespace(hooks=[hook])
    with pytest.raises(ZeroDivisionError), closing_hooks(job):
        raise ZeroDivisionError
    assert hook.closed
