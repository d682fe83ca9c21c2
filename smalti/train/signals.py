"""Stop requests: signals set a flag that the loop reads between steps.

SIGTERM (preemption) and the first Ctrl-C request a stop with a save after the running step. The second Ctrl-C stops at
once.
"""

import signal
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Self


class Stop(IntEnum):
    """The kind of stop requested; when ranks differ, the larger counts."""

    NONE = 0
    PREEMPTED = 1
    INTERRUPTED = 2


class StopSignals:
    """Context manager that stores the requested stop in ``requested``. Outside the main thread it gets no signals."""

    def __init__(self) -> None:
        self.requested = Stop.NONE
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self._before[number] = signal.signal(number, self._receive)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested == Stop.INTERRUPTED:
            raise KeyboardInterrupt
        self.requested = max(self.requested, Stop.INTERRUPTED if number == signal.SIGINT else Stop.PREEMPTED)
