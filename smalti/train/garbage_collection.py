"""Runs Python's garbage collector between steps only.

A rank that collects inside a step makes every other rank wait in the next collective, so all ranks collect before the
same step. Objects that exist when training begins are never scanned again. The collector's state is restored after the
block.
"""

import gc
from types import TracebackType
from typing import Self

EVERY_STEPS = 100
"""Steps between two collections of young objects; a step creates few cycles."""


class GarbageCollection:
    """Disables automatic collection inside a block ``with GarbageCollection() as garbage``, and collects on request.

    Call ``garbage.collect_if_due(step)`` before each step.
    """

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def collect_if_due(self, step: int) -> None:
        """Collect young objects every ``EVERY_STEPS`` steps."""
        if step % EVERY_STEPS == 0:
            gc.collect(1)

    def collect_all(self) -> None:
        """Collect all objects, as after a save, which takes long anyway."""
        gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
