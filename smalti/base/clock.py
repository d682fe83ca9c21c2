"""Clocks, in one place so that tests can replace them."""

import time
from datetime import UTC, datetime


def now_s() -> float:
    """Seconds on a clock that never goes back; only differences mean anything."""
    return time.perf_counter()


def wall_s() -> float:
    """Seconds since 1970, UTC."""
    return time.time()


def utc_text() -> str:
    """The present as ``2026-01-31T12:00:00.000Z``, sortable as text."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def seconds_of(utc: str | None) -> float | None:
    """Seconds since 1970 of a time that ``utc_text`` wrote; None for text that is no time."""
    try:
        return datetime.fromisoformat(utc or "").timestamp()
    except ValueError:
        return None


def age_s(utc: str | None) -> float | None:
    """Seconds since a time that ``utc_text`` wrote; None for text that is no time."""
    then_s = seconds_of(utc)
    return None if then_s is None else wall_s() - then_s
