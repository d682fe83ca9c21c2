"""Sends requests to a store: at one rate, and again after a transient failure, with pauses.

A SlowDown lowers the rate. Keys that were accepted before for the same action and are now denied are being renewed: the
request is repeated too. Thread-safe.
"""

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from smalti.base import clock, cloud, log
from smalti.base.errors import RetryableError, SmaltiError
from smalti.base.rate_limit import RateLimiter, backoff_s

T = TypeVar("T")

GIVE_UP_S = 600.0
"""How long a request is repeated, unless another time is given."""
_WARN_AFTER_S = 10.0
"""A store that has not answered correctly for so long gives a warning, once until it does."""


class Stopped(RetryableError):
    """The work was stopped between two requests; what was sent remains, and the next attempt continues from it."""


class Requests:
    """The requests of one process.

    requests_per_s: of all ``world_size`` processes together. give_up_s: a request fails for good after so many seconds
    of failures. ``stop``: set it to end all work with ``Stopped``.
    """

    def __init__(
        self, requests_per_s: float = 100.0, *, rank: int = 0, world_size: int = 1, give_up_s: float = GIVE_UP_S
    ) -> None:
        self.stop = threading.Event()
        self.sent = 0
        self.failed = 0
        self.slowed = 0
        """Number of times that the store asked for fewer requests."""
        self._give_up_s = give_up_s
        self._limiter = RateLimiter(requests_per_s, clock.now_s(), rank=rank, world_size=world_size)
        self._rng = random.Random()
        self._lock = threading.Lock()
        self._accepted: set[str] = set()
        """Actions that the store has allowed."""
        self._failing_since_s: float | None = None
        self._warned = False

    def send(self, url: str, action: str, request: Callable[[], T]) -> T:
        """Return the result of ``request``, which is called until it succeeds, fails for good, or time is up.

        Raises FileNotFoundError as it is, and otherwise ``cloud.final_error`` of the last failure. action: "read",
        "written", "listed" or "deleted", for messages.
        """
        began_s, failures = clock.now_s(), 0
        while True:
            self.wait_for_turn()
            try:
                result = request()
            except (FileNotFoundError, SmaltiError):
                raise
            except Exception as error:
                if cloud.trouble(error) == "missing":
                    raise FileNotFoundError(cloud.reason(error)) from error
                failures += 1
                pause_s = backoff_s(failures, self._rng)
                passes = self._may_pass(error, action) and clock.now_s() + pause_s - began_s < self._give_up_s
                if not passes:
                    raise cloud.final_error(url, error, action) from error
                self._warn(url, error)
                self._wait(pause_s)
            else:
                self._succeeded(url, action)
                return result

    def wait_for_turn(self) -> None:
        """Wait until one request may be sent. Raises Stopped."""
        with self._lock:
            wait_s = self._limiter.wait_s(clock.now_s())
            self.sent += 1
        self._wait(wait_s)

    def _wait(self, seconds: float) -> None:
        if self.stop.wait(seconds):
            raise Stopped("the copy was stopped", hint="the next attempt continues it")

    def _may_pass(self, error: Exception, action: str) -> bool:
        kind = cloud.trouble(error)
        with self._lock:
            self.failed += 1
            if kind == "slow":
                self.slowed += 1
                self._limiter.slow_down(clock.now_s())
            renewed = kind == "forbidden" and (action in self._accepted or "Expired" in str(error))
        return kind in ("slow", "again") or renewed

    def _warn(self, url: str, error: Exception) -> None:
        with self._lock:
            self._failing_since_s = self._failing_since_s or clock.now_s()
            if self._warned or clock.now_s() - self._failing_since_s < _WARN_AFTER_S:
                return
            self._warned = True
        log.get("store").warning("%s does not answer correctly (%s); trying again", url, cloud.reason(error))

    def _succeeded(self, url: str, action: str) -> None:
        with self._lock:
            self._accepted.add(action)
            self._failing_since_s = None
            if not self._warned:
                return
            self._warned = False
        log.get("store").info("%s answers again", url)
