"""Which requests run, and what is read of their prompts in a turn. Counts tokens; knows no tensor.

Promises: first come, first served: nothing overtakes the request that waits longest, so none starves; what a request
may come to need in the cache is set aside when it is let in, so one that runs never has to give way; a prompt is cut
at multiples of ``prefill_tokens`` from its own begin, whatever else runs, so its pieces have the same shape alone and
in company.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from smalti.base.errors import RetryableError, UserError
from smalti.serve.engine.sequence import Sequence

GRAIN_TOKENS = 64
"""The least that a row of the cache holds; its capacity is this times a power of two."""


@dataclass(frozen=True)
class Limits:
    """How much an engine takes on. Raises UserError when a value is out of its range."""

    max_rows: int = 32
    """Requests that run at the same time."""
    max_waiting: int = 1024
    """Requests that may wait for a place; one more is refused with QueueFull."""
    cache_bytes: int = 2 << 30
    """Memory for keys and values, allocated as it is needed; one request of the model's full context always fits."""
    prefill_tokens: int = 256
    """Tokens of prompts that are read between two decode steps: more delays the running requests longer."""
    step_rows: int = 16
    """A decode step is padded to a multiple of this. With 16 an answer is the same alone and in company, to the bit; 1
    lets one that runs alone decode up to twice as fast in fp32, and then it may part from the same one in company where
    two tokens are as good as equally likely."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_waiting", "cache_bytes", "prefill_tokens", "step_rows"):
            least = 0 if name == "max_waiting" else 1
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)} is out of range", allowed=f"{least} or more")


class QueueFull(RetryableError):
    """Too many requests wait already; the same one may be sent again later."""


def capacity_tokens(n_tokens: int, limit_tokens: int) -> int:
    """Tokens that the row of a request of ``n_tokens`` has room for: a power of two of grains, or the full context."""
    capacity = GRAIN_TOKENS
    while capacity < n_tokens:
        capacity *= 2
    return min(capacity, -(-limit_tokens // GRAIN_TOKENS) * GRAIN_TOKENS)


class Scheduler:
    """The requests of one engine: waiting, then reading (their prompt is read), then running (they generate)."""

    def __init__(self, limits: Limits, cache_tokens: int, limit_tokens: int) -> None:
        """``cache_tokens`` is what the cache may hold; ``limit_tokens`` the longest sequence."""
        self._limits = limits
        self._limit_tokens = limit_tokens
        self.cache_tokens = max(cache_tokens, capacity_tokens(limit_tokens, limit_tokens))
        self.reserved_tokens = 0
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(sequence)

    def admit(self) -> None:
        """Let in who waits longest, as long as there is a row and room in the cache."""
        while self.waiting and len(self.reading) + len(self.running) < self._limits.max_rows:
            need = self._need(self.waiting[0])
            if self.reserved_tokens + need > self.cache_tokens:
                return
            self.reserved_tokens += need
            self.reading.append(self.waiting.popleft())

    def prompts(self) -> Iterator[tuple[Sequence, int]]:
        """(request, end): read its prompt from ``cached_tokens`` up to ``end`` now. Within the turn's budget of tokens.

        A request whose prompt has been read is moved to ``running`` by ``start``, before the next one is asked for.
        """
        left = self._limits.prefill_tokens
        for sequence in list(self.reading):
            while sequence in self.reading:
                end = min(sequence.cached_tokens + self._limits.prefill_tokens, len(sequence.prompt_ids))
                if end - sequence.cached_tokens > left:
                    return
                left -= end - sequence.cached_tokens
                yield sequence, end

    def start(self, sequence: Sequence) -> None:
        """The prompt has been read and the request generates from now on."""
        self.reading.remove(sequence)
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request, wherever it stands."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        (self.reading if sequence in self.reading else self.running).remove(sequence)
        self.reserved_tokens -= self._need(sequence)

    def _need(self, sequence: Sequence) -> int:
        return capacity_tokens(sequence.most_tokens, self._limit_tokens)
