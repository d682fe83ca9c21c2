"""Response times of requests, and the deadlines and hedge times that follow, as arithmetic; starts no threads."""

from bisect import bisect_left, insort
from collections import deque

_SAMPLES = 200
_ENOUGH = 20
_HEDGE_FACTOR = 1.5
_HEDGE_MIN_S = 0.02
_HEDGE_FRAC = 0.05
_HEDGE_UNKNOWN_FRAC = 0.25
_SIZES = (256 << 10, 2 << 20, 1 << 62)
_BYTES_PER_S = 1e6
"""Assumed bandwidth of one of many requests over a link; halved after each long response that timed out."""
_MIN_BYTES_PER_S = 2e4


class Latency:
    """Recent response times by size, from which deadlines and hedge times are computed."""

    def __init__(self) -> None:
        self._recent: list[deque[float]] = [deque() for _ in _SIZES]
        self._ordered: list[list[float]] = [[] for _ in _SIZES]
        self._bytes_per_s = _BYTES_PER_S

    def add(self, length: int, seconds: float) -> None:
        """Record a response of ``length`` bytes."""
        size = bisect_left(_SIZES, length)
        if size:
            self._bytes_per_s = min(_BYTES_PER_S, max(self._bytes_per_s, length / seconds / 2))
        recent = self._recent[size]
        ordered = self._ordered[size]
        recent.append(seconds)
        insort(ordered, seconds)
        if len(recent) > _SAMPLES:
            ordered.remove(recent.popleft())

    def deadline_s(self, length: int, timeout_s: float) -> float:
        """Return the deadline of a request: ``timeout_s`` plus the time that its bytes take over a slow link."""
        return timeout_s + length / self._bytes_per_s

    def add_timeout(self, length: int) -> None:
        """Record a response of ``length`` bytes that was not complete at its deadline."""
        if length > _SIZES[0]:
            self._bytes_per_s = max(_MIN_BYTES_PER_S, self._bytes_per_s / 2)

    def hedge_after_s(self, length: int, timeout_s: float) -> float:
        """Return the seconds after which a request is hedged.

        This is a multiple of the 95th percentile of responses of this size or larger; a fraction of the timeout until
        there are enough samples.
        """
        for ordered in self._ordered[bisect_left(_SIZES, length) :]:
            if len(ordered) >= _ENOUGH:
                return max(_HEDGE_MIN_S, _HEDGE_FACTOR * ordered[int(0.95 * len(ordered))])
        return timeout_s * _HEDGE_UNKNOWN_FRAC


def hedge_allowed(requests: float, hedges: float) -> bool:
    """Whether one more hedge keeps hedges at a twentieth of all requests."""
    return hedges < 1 + _HEDGE_FRAC * requests
