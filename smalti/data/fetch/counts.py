"""Counts of what reading from stores costs."""

import threading

from smalti.base.errors import SmaltiError

NAMES: dict[str, str] = {
    "requests": "requests sent, second ones included",
    "bytes": "bytes received",
    "retries": "requests sent again after a failure",
    "hedges": "second requests sent because the first took long",
    "slowdowns": "answers that asked for fewer requests (503 SlowDown, 429)",
    "failovers": "ranges that another copy gave than the first in the list",
    "cache_hits": "ranges that came from the node's cache",
    "rereads": "blocks that failed their check and were good when read again",
    "wait_s": "seconds that readers waited, summed over threads",
}
"""Name -> meaning."""


class Counts:
    """Sums by name, for all files that are opened with it. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(NAMES, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to one of NAMES."""
        if name not in self._sums:
            raise SmaltiError(f"'{name}' is not counted; see smalti/data/fetch/counts.py")
        with self._lock:  # readers add from their threads, the engine from its own
            self._sums[name] += amount

    def __getitem__(self, name: str) -> float:
        return self._sums[name]

    def as_dict(self) -> dict[str, float]:
        """All sums."""
        return dict(self._sums)
