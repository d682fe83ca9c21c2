"""When something is due: every so many steps, or every so many seconds."""

from smalti.base import clock
from smalti.config.durations import to_seconds, to_steps


class Cadence:
    """``due(step)`` after update number ``step`` (from 1). In steps it is a pure function of ``step``.

    In seconds it follows this process's clock, so its answer must be voted on (``by_clock``).
    """

    def __init__(self, every: str, *, total_steps: int, global_batch_tokens: int) -> None:
        self._seconds = to_seconds(every)
        self._steps = 0
        if self._seconds is None:
            steps = to_steps(every, total_steps=total_steps, global_batch_tokens=global_batch_tokens)
            self._steps = max(1, steps)
        self._last_s = clock.now_s()

    @property
    def by_clock(self) -> bool:
        """Whether the answer depends on this process's clock."""
        return self._seconds is not None

    def due(self, step: int) -> bool:
        """Whether it is time after update number ``step``."""
        if self._seconds is None:
            return step % self._steps == 0
        return clock.now_s() - self._last_s >= self._seconds

    def done(self) -> None:
        """It happened: the clock starts again."""
        self._last_s = clock.now_s()
