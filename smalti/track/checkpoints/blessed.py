"""Blessed checkpoints: those after which the run stayed healthy for a while (``train.checkpoint.keep.blessed_after``).

A run whose loss diverges can be continued from the newest of them, where newer checkpoints may have the fault already.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from smalti.config.durations import RunLength
from smalti.config.schema import split_duration
from smalti.track.checkpoints.marks import BLESSED, is_marked, mark
from smalti.track.checkpoints.names import complete, step_of

_UNHEALTHY = ("not_finite", "checkpoint_rejected")


def healthy_since(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the step since which the run is healthy: that of the first resume after the last fault, else 0.

    Faults are a step that was not finite and a rejected checkpoint. A preemption or a dead rank is none.
    """
    since, is_healthy = 0, True
    for event in events:
        if event.get("event") in _UNHEALTHY:
            is_healthy = False
        elif event.get("event") == "resumed" and not is_healthy:
            since, is_healthy = int(event["step"]), True
    return since


def bless(folder: Path, step: int, *, since: int, after: str, length: RunLength) -> list[int]:
    """Mark the checkpoints in ``folder`` that the run is now far enough beyond; returns their steps, ascending.

    step: the run is healthy up to here, and has been since step ``since``. after: the distance, a duration. Links are
    not marked, as their targets belong to other runs.
    """
    blessed = []
    for name in reversed(complete(folder)):
        path, saved = folder / name, step_of(name)
        far_enough = saved < step and _trained(length, max(saved, since), step, after)
        if far_enough and not path.is_symlink() and not is_marked(path, BLESSED):
            mark(path, BLESSED)
            blessed.append(saved)
    return blessed


def _trained(length: RunLength, start: int, end: int, after: str) -> bool:
    """Return whether the steps from ``start`` to ``end`` are at least ``after``."""
    amount, unit = split_duration(after)
    if unit == "tok":
        return length.tokens(end) - length.tokens(start) >= amount
    return end - start >= length.step_at(after)
