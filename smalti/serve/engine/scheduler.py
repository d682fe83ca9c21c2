"""Decides which requests run and how much of their prompts each step prefills. Counts tokens; knows no tensor.

First come, first served: no request overtakes one that waits longer, so none starves. The cache that a request may need
is reserved when it is admitted, so a running request is never preempted. A prompt is cut at multiples of
``prefill_tokens`` from its own start, so the shapes of its chunks are independent of the batch.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from smalti.base.errors import RetryableError, UserError
from smalti.serve.engine.request import Request

MIN_CAPACITY_TOKENS = 64
"""Smallest capacity of a row of the cache; every capacity is this times a power of two."""


@dataclass(frozen=True)
class Limits:
    """Bounds on the load of an engine. Raises UserError for a value out of range."""

    max_rows: int = 32
    """Requests that run at the same time."""
    max_waiting: int = 1024
    """Requests that may wait; one more is refused with QueueFull."""
    cache_bytes: int = 2 << 30
    """Memory for keys and values, allocated as needed; one request of the model's full context always fits."""
    prefill_tokens: int = 256
    """Prompt tokens prefilled between two decode steps: a larger value delays the running requests longer."""
    step_rows: int | None = None
    """A decode step is padded to a multiple of this. With 16 an answer of a dense model is batch-invariant to the bit.
    With 1 a request that runs alone decodes up to twice as fast in fp32, but its answer may differ from that in a batch
    where two tokens are about equally likely. Default: 16, and 1 for a model with experts, whose answers are not
    batch-invariant to the bit in either case."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_waiting", "cache_bytes", "prefill_tokens", "step_rows"):
            minimum = 0 if name == "max_waiting" else 1
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UserError(f"{name}={value} is out of range", allowed=f"{minimum} or more")


class QueueFull(RetryableError):
    """Too many requests are waiting; the same request may be sent again later."""


def capacity_tokens(n_tokens: int, limit_tokens: int) -> int:
    """Return the capacity of the row of a request of ``n_tokens``: 64 times a power of two, or the full context."""
    capacity = MIN_CAPACITY_TOKENS
    while capacity < n_tokens:
        capacity *= 2
    return min(capacity, -(-limit_tokens // MIN_CAPACITY_TOKENS) * MIN_CAPACITY_TOKENS)


class Scheduler:
    """The requests of one engine, each waiting, prefilling (its prompt is read) or running (it generates)."""

    def __init__(self, limits: Limits, cache_tokens: int, limit_tokens: int) -> None:
        """``cache_tokens``: what the cache may hold. ``limit_tokens``: the longest request."""
        self._limits = limits
        self._limit_tokens = limit_tokens
        self.cache_tokens = max(cache_tokens, capacity_tokens(limit_tokens, limit_tokens))
        self.reserved_tokens = 0
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []

    @property
    def n_active(self) -> int:
        """Requests that have been admitted and have not ended."""
        return len(self.prefilling) + len(self.running)

    def add(self, request: Request) -> None:
        """Append a request to the queue."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Admit waiting requests in order, as long as there is a row and cache to reserve for the first of them."""
        while self.waiting and self.n_active < self._limits.max_rows:
            tokens = self._reservation_tokens(self.waiting[0])
            if self.reserved_tokens + tokens > self.cache_tokens:
                return
            self.reserved_tokens += tokens
            self.prefilling.append(self.waiting.popleft())

    def prefills(self) -> Iterator[tuple[Request, int]]:
        """Yield (request, end): prefill its prompt from ``cached_tokens`` to ``end`` now, within the step's budget.

        The caller advances ``cached_tokens``, and calls ``start`` for a complete prompt, before it takes the next pair.
        """
        budget = self._limits.prefill_tokens
        for request in list(self.prefilling):
            while request in self.prefilling:
                end = min(request.cached_tokens + self._limits.prefill_tokens, len(request.prompt_ids))
                if end - request.cached_tokens > budget:
                    return
                budget -= end - request.cached_tokens
                yield request, end

    def start(self, request: Request) -> None:
        """Move a request whose prompt is complete to ``running``."""
        self.prefilling.remove(request)
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """Remove a request from whichever list holds it, and its reservation."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        (self.prefilling if request in self.prefilling else self.running).remove(request)
        self.reserved_tokens -= self._reservation_tokens(request)

    def _reservation_tokens(self, request: Request) -> int:
        return capacity_tokens(request.max_cached_tokens, self._limit_tokens)
