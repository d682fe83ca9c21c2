"""Clocks, in one place so that tests can replace them."""

import time
from datetime import UTC, datetime


def now_s() -> float:
    """Return seconds on a monotonic clock; only differences have a meaning."""
    return time.perf_counter()


def wall_s() -> float:
    """Return seconds since 1970, UTC."""
    return time.time()


def utc_text() -> str:
    """Return the current time as ``2026-01-31T12:00:00.000Z``, sortable as text."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def seconds_of(utc: str | None) -> float | None:
    """Return seconds since 1970 of a time written by ``utc_text``; None for text that is not a time."""
    try:
        return datetime.fromisoformat(utc or "").timestamp()
    except ValueError:
        return None


def age_s(utc: str | None) -> float | None:
    """Return the seconds since a time written by ``utc_text``; None for text that is not a time."""
    then_s = seconds_of(utc)
    return None if then_s is None else wall_s() - then_s
