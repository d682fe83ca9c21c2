"""When something is due: every N steps, tokens or seconds."""

from collections.abc import Callable

from smalti.base import clock
from smalti.config.durations import RunLength, to_seconds
from smalti.config.schema import split_duration


class Cadence:
    """``due(step)`` after update number ``step`` (from 1). In steps or tokens it is a pure function of ``step``.

    In seconds it follows this process's clock, so its answer must be voted on. ``auto``: ``auto_s`` gives the
    seconds.
    """

    def __init__(self, every: str, length: RunLength, auto_s: Callable[[], float] | None = None) -> None:
        self._auto_s = auto_s if every == "auto" else None
        if self._auto_s is not None:
            every = "0s"
        self._seconds = to_seconds(every)
        self._length = length
        self._last_s = clock.now_s()
        amount, unit = split_duration(every)
        self._tokens = int(amount) if unit == "tok" else None
        by_steps = self._seconds is None and self._tokens is None
        self._steps = max(1, min(length.step_at(every), length.total_steps)) if by_steps else 0

    def due(self, step: int) -> bool:
        """Return whether it is time after update number ``step``."""
        if self._steps:
            return step % self._steps == 0
        if self._tokens is not None:  # the step that completes another so many tokens
            return self._length.tokens(step) // self._tokens > self._length.tokens(step - 1) // self._tokens
        seconds = self._seconds if self._auto_s is None else self._auto_s()
        assert seconds is not None
        return clock.now_s() - self._last_s >= seconds

    def done(self) -> None:
        """Restart the clock."""
        self._last_s = clock.now_s()
