"""Reasons to end an attempt without a fault: it saves, and the next one follows by itself.

``slow``: MFU stays below a share of its trailing median (``train.health.mfu_below``). ``grow``: the run has continued
on fewer ranks for some time (``train.restart.grow_after``). ``leave``: a node is to be stopped.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from smalti.base import clock
from smalti.base.units import format_frac, format_seconds
from smalti.config.health import HealthConfig
from smalti.track.line_file import parse_line
from smalti.track.sinks import jsonl

if TYPE_CHECKING:
    from smalti.fleet.nodes.lead import Nodes

_SPEED = "throughput/device/flops_per_sec"
"""MFU times the peak of the device, which need not be known."""
_LOW_LINES = 20
"""MFU must stay low for so many lines of the metrics."""
_TRAILING_LINES, _LEAST_LINES = 200, 20
"""Lines before those whose median is compared; fewer than the least are not."""
_EVERY_S = 1.0


@dataclass(frozen=True)
class Pause:
    """Why an attempt is to end."""

    cause: Literal["slow", "grow", "leave"]
    words: str


class Pauses:
    """Looks for a reason about once a second, in one attempt."""

    def __init__(
        self, folder: Path, health: HealthConfig | None, *, grow_after_s: float | None, nodes: "Nodes | None" = None
    ) -> None:
        """The attempt begins now. None: never for that reason."""
        self._nodes = nodes
        below = None if health is None else health.mfu_below
        self._speed = None if below is None else _Speed(folder / jsonl.FILE_NAME, below)
        self._grow_after_s, self._began_s = grow_after_s, clock.now_s()
        self._looked_s = self._began_s

    def look(self) -> Pause | None:
        """Return the reason to end the attempt now, if there is one."""
        now_s = clock.now_s()
        if now_s - self._looked_s < _EVERY_S:
            return None
        self._looked_s = now_s
        leaving = None if self._nodes is None else self._nodes.leaving()
        if leaving is not None:
            return Pause("leave", f"node {leaving} is to be stopped")
        may_grow = self._nodes is None or self._nodes.all_there
        if may_grow and self._grow_after_s is not None and now_s - self._began_s >= self._grow_after_s:
            return Pause("grow", f"on fewer ranks for {format_seconds(now_s - self._began_s)}")
        return None if self._speed is None else self._speed.look()


class _Speed:
    """Follows the metrics of an attempt."""

    def __init__(self, path: Path, below: float) -> None:
        self._path, self._below = path, below
        self._offset = path.stat().st_size if path.exists() else 0
        self._speeds: deque[float] = deque(maxlen=_TRAILING_LINES + _LOW_LINES)

    def look(self) -> Pause | None:
        """Return whether the speed has been low."""
        self._read()
        speeds = list(self._speeds)
        trailing, recent = speeds[:-_LOW_LINES], speeds[-_LOW_LINES:]
        if len(trailing) < _LEAST_LINES:
            return None
        median = statistics.median(trailing)
        if max(recent) >= self._below * median:
            return None
        share = statistics.median(recent) / median
        return Pause("slow", f"MFU was {format_frac(share)} of its trailing median for {_LOW_LINES} lines of metrics")

    def _read(self) -> None:
        try:
            if self._path.stat().st_size < self._offset:  # steps that are repeated were removed
                self._offset = 0
                self._speeds.clear()
            with self._path.open("rb") as file:
                file.seek(self._offset)
                *lines, rest = file.read().split(b"\n")
                self._offset = file.tell() - len(rest)
        except OSError:
            return
        for line in lines:
            value = (parse_line(line.decode(errors="replace")) or {}).get(_SPEED)
            if isinstance(value, int | float):
                self._speeds.append(float(value))
