"""Copies ``metrics.jsonl`` to one tracker, in a thread of its own: the file is the queue.

Promises: training never waits for a tracker and never fails by one; nothing is held in memory, so an outage of any
length costs none; a value that the tracker has of a step is not sent again, so a run that is resumed goes on without a
step twice, and what a tracker lacks, from whichever attempt, is sent by the next. Of steps that were done again after a
crash the tracker keeps the first values where it cannot forget them; the file has the last.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smalti.base import clock, log
from smalti.base.errors import SmaltiError
from smalti.track.append import parse_line
from smalti.track.provenance import redact
from smalti.track.sinks import jsonl

_EVERY_S = 3.0
_LONGEST_PAUSE_S = 60.0
_CHUNK_LINES = 500
_GRACE_S = 0.5
"""How much longer than it was told the end waits for a request that is under way."""


@dataclass(frozen=True)
class Row:
    """A line of ``metrics.jsonl``; a value that was not finite is NaN."""

    step: int
    time_s: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """Where a feed goes. Any exception means "not now"; the same rows are given again then."""

    name: str
    place: Mapping[str, str]
    """Where the run is found there: ``page`` or ``folder``, and more."""

    def check(self) -> None:
        """UserError where it is not installed or, as far as can be seen without changing a thing, does not answer."""

    def open(self) -> Mapping[str, int]:
        """Go on in the place of this run at the tracker, or make one; the last step that it has, by metric name."""

    def send(self, rows: Sequence[Row]) -> None:
        """Take rows, oldest first."""

    def close(self, state: str, end_s: float | None) -> None:
        """All is sent: say how the attempt ended, as a state of ``status.json``, and the time of the last line."""


class Events(Protocol):
    """Where events go."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""


class Feed:
    """The copying, from ``start`` to ``close``."""

    def __init__(self, tracker: Tracker, folder: str | Path, events: Events, *, every_s: float = _EVERY_S) -> None:
        self.tracker, self._events, self._every_s = tracker, events, every_s
        self._lines = _Lines(Path(folder) / jsonl.FILE_NAME)
        self._has: Mapping[str, int] | None = None
        self._lost = False
        self._pause_s = every_s
        self._closing = threading.Event()
        self._deadline_s = 0.0
        self._state = "running"
        self._last_s: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"smalti-{tracker.name}", daemon=True)

    def start(self, *, must_answer: bool) -> None:
        """Begin. ``must_answer``: open the tracker first, and raise where it does not answer; else the thread does."""
        if must_answer:
            self._open()
        self._thread.start()

    def close(self, state: str, *, wait_s: float) -> int:
        """Send the rest and end with ``state``, for at most about ``wait_s``; returns how many lines were not sent."""
        self.end(state, wait_s=wait_s)
        return self.wait()

    def end(self, state: str, *, wait_s: float) -> None:
        """The first half of ``close``: tell the thread, which then has ``wait_s`` from now on."""
        self._state, self._deadline_s = state, clock.now_s() + wait_s
        self._closing.set()

    def wait(self) -> int:
        """The second half: wait for the thread and say what is missing."""
        self._thread.join(timeout=max(0.0, self._deadline_s - clock.now_s()) + _GRACE_S)
        left = self._lines.count_left()
        if left or not self._closed:
            what = f"{left} lines of metrics.jsonl are" if left else f"the state '{self._state}' is"
            log.get("track").warning(
                "%s not at %s; to send what is missing: smalti runs send %s",
                what, self.tracker.name, self._lines.path.parent,
            )  # fmt: skip
            self._event("tracker_behind", lines=left)
        return left

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._turn() or self._lost:
                self._closing.wait(self._pause_s)
        while not self._turn():
            left_s = self._deadline_s - clock.now_s()
            if left_s <= 0:
                return
            if self._lost:
                time.sleep(min(1.0, left_s))
        try:
            self.tracker.close(self._state, self._last_s)
            self._closed = True
        except Exception as error:
            self._failed(error)

    def _turn(self) -> bool:
        """Send some of what is there; True when nothing is left."""
        try:
            if self._has is None:
                self._open()
            assert self._has is not None
            rows, end = self._lines.next(_CHUNK_LINES)
            wanted = [row for row in map(self._lacking, rows) if row.values]
            if wanted:
                self.tracker.send(wanted)
        except Exception as error:
            self._failed(error)
            return False
        self._lines.offset = end
        self._last_s = rows[-1].time_s if rows else self._last_s
        if self._lost:
            self._lost = False
            log.get("track").info("%s takes lines again", self.tracker.name)
            self._event("tracker_back")
        self._pause_s = self._every_s
        return len(rows) < _CHUNK_LINES

    def _open(self) -> None:
        self._has = self.tracker.open()
        place = self.tracker.place
        at = place.get("page") or place.get("folder")
        log.get("track").info("%s: %s", self.tracker.name, at)
        self._event("tracker_opened", at=at)

    def _lacking(self, row: Row) -> Row:
        assert self._has is not None
        has = self._has
        return Row(
            row.step, row.time_s, {key: value for key, value in row.values.items() if row.step > has.get(key, -1)}
        )

    def _failed(self, error: Exception) -> None:
        self._pause_s = min(max(self._pause_s, self._every_s) * 2, _LONGEST_PAUSE_S)
        if self._lost:
            return
        self._lost = True
        text = brief(error)
        log.get("track").warning(
            "%s takes nothing (%s); training goes on, and what it lacks is sent when it is back",
            self.tracker.name, text,
        )  # fmt: skip
        self._event("tracker_lost", reason=text)

    def _event(self, kind: str, **fields: Any) -> None:
        with suppress(SmaltiError):  # a full disk is told by those who cannot go on without it
            self._events.write(kind, tracker=self.tracker.name, **fields)


class _Lines:
    """Reads a growing file of lines; what is not a whole line yet is left for later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def next(self, count: int) -> tuple[list[Row], int]:
        """At most ``count`` lines from ``offset`` on, and the offset behind them."""
        rows, end = [], self.offset
        for line, behind in self._whole_lines():
            row, end = _row(line), behind
            if row is not None:
                rows.append(row)
            if len(rows) == count:
                break
        return rows, end

    def count_left(self) -> int:
        """Lines behind ``offset``."""
        return sum(_row(line) is not None for line, _ in self._whole_lines())

    def _whole_lines(self) -> Iterator[tuple[bytes, int]]:
        end = self.offset
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb") as file:
            file.seek(end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield line, end


def _row(line: bytes) -> Row | None:
    value = parse_line(line.decode("utf-8", errors="replace"))
    if value is None or not isinstance(value.get("step"), int):
        return None
    numbers = {
        key: float("nan") if number is None else float(number)
        for key, number in value.items()
        if key not in ("step", "time") and (number is None or isinstance(number, int | float))
    }
    time_s = clock.seconds_of(str(value.get("time")))
    return Row(value["step"], clock.wall_s() if time_s is None else time_s, numbers)


def brief(error: Exception) -> str:
    """The first line of an error, short, without logins; of a failed request what the system said of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            error = cause
        cause = cause.__cause__ or cause.__context__
    text = redact(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
