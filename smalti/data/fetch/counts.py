"""Counters of the cost of reading from stores."""

import threading

from smalti.base.errors import SmaltiError

NAMES: dict[str, str] = {
    "requests": "requests sent, including hedges",
    "bytes": "bytes received",
    "retries": "requests sent again after a failure",
    "hedges": "second requests sent because the first took long",
    "slowdowns": "responses that demand fewer requests (503 SlowDown, 429)",
    "failovers": "ranges read from another replica than the first in the list",
    "cache_hits": "ranges read from the node's cache",
    "rereads": "blocks that failed their check and passed it when read again",
    "wait_s": "seconds that readers waited, summed over threads",
}
"""Name -> meaning."""


class Counts:
    """Sums by name over all files that are opened with these counters. Thread-safe."""

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
        """Return all sums by name."""
        return dict(self._sums)
