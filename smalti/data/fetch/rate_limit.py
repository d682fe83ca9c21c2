"""Rate limit, back-off and hedging of requests, as arithmetic on times; starts no threads.

All ranks together stay below ``requests_per_s``: each has its share and its own phase. After a SlowDown the rate drops
at once (times 0.7) and recovers by a twentieth of the full rate per second, so that thousands of throttled ranks do not
return at the same time.
"""

import asyncio
import random
from bisect import bisect_left, insort
from collections import deque

from smalti.data.fetch.files import Share

_CUT = 0.7
_CUT_EVERY_S = 1.0
_RECOVERY_PER_S = 0.05
_FLOOR = 0.05
_BURST_S = 0.25
"""After a pause, the requests of this many seconds may be sent at once."""

_BASE_S = 0.1
_CAP_S = 5.0

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


class RateLimiter:
    """A leaky bucket with this process's share of the job's request rate. For one event loop."""

    def __init__(self, requests_per_s: float, share: Share, now_s: float) -> None:
        self._full = requests_per_s / share.world_size
        self._cut_rate = self._full
        self._cut_s = now_s
        self._burst_s = max(0.0, _BURST_S - 1 / self._full)
        # when the bucket will be full again; the first request of rank r is r / requests_per_s after that of rank 0
        self._full_at_s = now_s + self._burst_s + share.rank / requests_per_s

    def rate_per_s(self, now_s: float) -> float:
        """Return the current rate limit."""
        return min(self._full, self._cut_rate + (now_s - self._cut_s) * _RECOVERY_PER_S * self._full)

    def slow_down(self, now_s: float) -> None:
        """Lower the rate, at most once per second, because many requests are throttled at the same time."""
        if now_s - self._cut_s >= _CUT_EVERY_S or self._cut_rate == self._full:
            self._cut_rate = max(self.rate_per_s(now_s) * _CUT, self._full * _FLOOR)
            self._cut_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Reserve one request; returns the seconds to wait before it is sent."""
        wait_s = max(0.0, self._full_at_s - self._burst_s - now_s)
        self._full_at_s = max(self._full_at_s, now_s) + 1 / self.rate_per_s(now_s)
        return wait_s

    def is_free(self, now_s: float) -> bool:
        """Whether a request could be sent at once."""
        return self._full_at_s - self._burst_s <= now_s

    async def take(self) -> None:
        """Wait until one request may be sent."""
        wait_s = self.wait_s(asyncio.get_running_loop().time())
        if wait_s > 0:
            await asyncio.sleep(wait_s)


def backoff_s(failures: int, rng: random.Random) -> float:
    """Return the seconds to wait after ``failures`` in a row: uniform up to a bound that doubles ("full jitter")."""
    return rng.uniform(0, min(_CAP_S, _BASE_S * 2 ** min(failures, 16)))


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
