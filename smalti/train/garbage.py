"""Python's garbage collector, run between steps and at no other time.

Promises: no rank stops inside a step to collect, where every other rank would wait for it in the next collective; all
ranks collect before the same step. What exists when training begins is never looked at again. Outside the block the
collector is as it was.
"""

import gc
from types import TracebackType
from typing import Self

EVERY_STEPS = 100
"""Young objects are collected so often; a step leaves few cycles behind."""


class BetweenSteps:
    """``with BetweenSteps() as garbage: ... garbage.step(step)`` before each step."""

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def step(self, step: int) -> None:
        """Collect where it is this step's turn."""
        if step % EVERY_STEPS == 0:
            gc.collect(1)

    def all(self) -> None:
        """Collect everything: after a save, which takes long anyway."""
        gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
