"""Rate limit and back-off of requests, as arithmetic on times; starts no threads.

All ranks together stay below ``requests_per_s``: each has its share and its own phase. After a SlowDown the rate drops
at once (times 0.7) and recovers by a twentieth of the full rate per second, so that thousands of throttled ranks do not
return at the same time.
"""

import asyncio
import random

_CUT = 0.7
_CUT_EVERY_S = 1.0
_RECOVERY_PER_S = 0.05
_FLOOR = 0.05
_BURST_S = 0.25
"""After a pause, the requests of this many seconds may be sent at once."""

_BASE_S = 0.1
_CAP_S = 5.0


class RateLimiter:
    """A leaky bucket with this process's share of the job's request rate. Not thread-safe."""

    def __init__(self, requests_per_s: float, now_s: float, *, rank: int = 0, world_size: int = 1) -> None:
        self._full = requests_per_s / world_size
        self._cut_rate = self._full
        self._cut_s = now_s
        self._burst_s = max(0.0, _BURST_S - 1 / self._full)
        # when the bucket will be full again; the first request of rank r is r / requests_per_s after that of rank 0
        self._full_at_s = now_s + self._burst_s + rank / requests_per_s

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
