"""Copies ``metrics.jsonl`` to one tracker in a thread, with the file as the queue.

Guarantees: training never waits for a tracker and never fails because of one; an outage uses no memory; each value is
sent once, and values missing at the tracker, of any attempt, are sent by the next attempt. Of steps repeated after a
crash, a tracker that cannot delete values has the first values, the file the last.
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
from smalti.track.line_file import parse_line
from smalti.track.provenance import redact
from smalti.track.sinks import jsonl

_EVERY_S = 3.0
_LONGEST_PAUSE_S = 60.0
_CHUNK_LINES = 500
_GRACE_S = 0.5
"""Extra time that ``wait`` gives a request in flight."""


@dataclass(frozen=True)
class Row:
    """A line of ``metrics.jsonl``; a value that was not finite is NaN."""

    step: int
    time_s: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """The destination of a feed. After any exception the same rows are sent again later."""

    name: str
    place: Mapping[str, str]
    """Location of the run at the tracker: ``page`` or ``folder``, and more."""

    def check(self) -> None:
        """Raise UserError where it is not installed or does not answer; changes nothing."""

    def open(self) -> Mapping[str, int]:
        """Reopen or create the run at the tracker; returns the last step that it has, by metric name."""

    def send(self, rows: Sequence[Row]) -> None:
        """Store rows, oldest first."""

    def close(self, state: str, end_s: float | None) -> None:
        """End the run with a state of ``status.json`` and the time of the last line, after all rows were sent."""


class Events(Protocol):
    """A log of events."""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""


class Feed:
    """Copies the file to a tracker from ``start`` to ``close``."""

    def __init__(self, tracker: Tracker, folder: str | Path, events: Events, *, every_s: float = _EVERY_S) -> None:
        self.tracker = tracker
        self._events = events
        self._every_s = every_s
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
        """Start the thread. ``must_answer``: open the tracker first, and raise where it does not answer."""
        if must_answer:
            self._open()
        self._thread.start()

    def close(self, state: str, *, wait_s: float) -> int:
        """Send the rest and end with ``state``, for at most about ``wait_s``; returns how many lines were not sent."""
        self.end(state, wait_s=wait_s)
        return self.wait()

    def end(self, state: str, *, wait_s: float) -> None:
        """Request that the thread ends within ``wait_s``: the first half of ``close``."""
        self._state = state
        self._deadline_s = clock.now_s() + wait_s
        self._closing.set()

    def wait(self) -> int:
        """Wait for the thread and report what was not sent: the second half of ``close``."""
        self._thread.join(timeout=max(0.0, self._deadline_s - clock.now_s()) + _GRACE_S)
        left = self._lines.count_left()
        if left or not self._closed:
            what = f"{left} lines of metrics.jsonl are" if left else f"the state '{self._state}' is"
            log.get("track").warning(
                "%s not at %s; to send the rest: smalti runs send %s",
                what, self.tracker.name, self._lines.path.parent,
            )  # fmt: skip
            self._event("tracker_behind", lines=left)
        return left

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._send_some() or self._lost:
                self._closing.wait(self._pause_s)
        while not self._send_some():
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

    def _send_some(self) -> bool:
        """Send up to ``_CHUNK_LINES`` lines; returns True when nothing is left."""
        try:
            if self._has is None:
                self._open()
            assert self._has is not None
            rows, end = self._lines.next(_CHUNK_LINES)
            missing = [row for row in map(self._lacking, rows) if row.values]
            if missing:
                self.tracker.send(missing)
        except Exception as error:
            self._failed(error)
            return False
        self._lines.offset = end
        self._last_s = rows[-1].time_s if rows else self._last_s
        if self._lost:
            self._lost = False
            log.get("track").info("%s accepts metrics again", self.tracker.name)
            self._event("tracker_back")
        self._pause_s = self._every_s
        return len(rows) < _CHUNK_LINES

    def _open(self) -> None:
        self._has = self.tracker.open()
        place = self.tracker.place
        location = place.get("page") or place.get("folder")
        log.get("track").info("%s: %s", self.tracker.name, location)
        self._event("tracker_opened", at=location)

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
            "%s does not accept metrics (%s); training continues, and they are sent when it is back",
            self.tracker.name, text,
        )  # fmt: skip
        self._event("tracker_lost", reason=text)

    def _event(self, kind: str, **fields: Any) -> None:
        with suppress(SmaltiError):  # a full disk is reported by those that cannot continue without it
            self._events.write(kind, tracker=self.tracker.name, **fields)


class _Lines:
    """Reads a growing file of lines; an incomplete line is left for later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def next(self, count: int) -> tuple[list[Row], int]:
        """Return at most ``count`` rows from ``offset`` on, and the offset after them."""
        rows: list[Row] = []
        end = self.offset
        for line, line_end in self._whole_lines():
            end = line_end
            row = _row(line)
            if row is not None:
                rows.append(row)
            if len(rows) == count:
                break
        return rows, end

    def count_left(self) -> int:
        """Return the number of rows after ``offset``."""
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
    """Return the first line of an error, short, without logins; for a failed request the operating system's message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            error = cause
        cause = cause.__cause__ or cause.__context__
    text = redact(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
