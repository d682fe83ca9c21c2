"""Requests to stop: the signals that the agent receives."""

import signal
from types import FrameType
from typing import Any, Self


class StopRequests:
    """Counts of the signals to the agent."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminations = 0
        self._before: dict[int, Any] = {}

    @property
    def any(self) -> bool:
        """True once a stop was requested."""
        return self.interrupts > 0 or self.terminations > 0

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.terminations += 1
