"""Python's garbage collector, run between steps only.

A rank that collects inside a step makes every other rank wait in the next collective, so all ranks collect before the
same step. Objects that exist when training begins are never scanned again. Outside the block the collector is as it
was.
"""

import gc
from types import TracebackType
from typing import Self

EVERY_STEPS = 100
"""How often young objects are collected; a step leaves few cycles behind."""


class BetweenSteps:
    """``with BetweenSteps() as garbage: ... garbage.step(step)`` before each step."""

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def step(self, step: int) -> None:
        """Collect young objects every ``EVERY_STEPS`` steps."""
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
