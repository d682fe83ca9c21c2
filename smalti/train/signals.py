"""Stop requests: signals set a flag that the loop reads between steps.

SIGTERM (preemption) and the first Ctrl-C ask for a stop after the running step, with a save. The second Ctrl-C stops
at once.
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
    """While the block runs, ``asked`` says whether to stop. Off the main thread it receives no signals."""

    def __init__(self) -> None:
        self.asked = Stop.NONE
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
        if number == signal.SIGINT and self.asked == Stop.INTERRUPTED:
            raise KeyboardInterrupt
        self.asked = max(self.asked, Stop.INTERRUPTED if number == signal.SIGINT else Stop.PREEMPTED)
