"""Reads the batches of the next steps in threads while a step runs.

Guarantees: batches are returned in order, and an error of a step is raised when that step is requested. Batches for
``prefetch_s`` of training at recent step times are read ahead, at least one, within ``prefetch_bytes``; several at a
time if reading takes longer than a step. Closing does not wait for a read that hangs.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from math import ceil
from statistics import median
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from smalti.base import clock

T = TypeVar("T")

_UNKNOWN_DEPTH = 4
"""Steps to read ahead before a step has been timed and a batch measured."""
_LATELY = 9
_END_S = 1.0


class ReadAhead(Generic[T]):
    """An iterator over ``read(step)`` for each step of [first_step, last_step), and a context that ends the threads.

    threads: number of concurrent calls of ``read``; 1 for a reader that must be called step by step. interrupt: called
    at the end to cancel running reads.
    """

    def __init__(
        self,
        read: Callable[[int], T],
        first_step: int,
        last_step: int,
        *,
        prefetch_s: float,
        prefetch_bytes: int,
        threads: int = 1,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self._read = read
        self._last = last_step
        self._interrupt = interrupt
        self._prefetch_s = prefetch_s
        self._prefetch_bytes = prefetch_bytes
        self._most = threads
        self._change = threading.Condition()
        self._next_read = self._next_given = first_step
        self._ready: dict[int, tuple[T | None, BaseException | None]] = {}
        self._running = 0
        self._starving = self._closed = False
        self._step_s: deque[float] = deque(maxlen=_LATELY)
        self._read_s: deque[float] = deque(maxlen=_LATELY)
        self._batch_bytes = 0
        self._given_s: float | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"read-ahead-{number}", daemon=True) for number in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._change:
            self._closed = True
            self._ready.clear()
            self._change.notify_all()
            running = self._running
        if running and self._interrupt is not None:
            self._interrupt()
        end_s = clock.now_s() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - clock.now_s()))

    def __iter__(self) -> Iterator[T]:
        return self

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the next step's batch or its error; return whether it is ready."""
        with self._change:
            self._request()
            return self._change.wait_for(lambda: self._next_given in self._ready or self._closed, timeout=seconds)

    def has(self, step: int) -> bool:
        """Return whether the batch of a later step, or its error, is ready; true beyond the last step."""
        return step >= self._last or step in self._ready

    def __next__(self) -> T:
        with self._change:
            if self._next_given >= self._last or self._closed:
                raise StopIteration
            self._request()
            while self._next_given not in self._ready:  # as long as the reader's own deadlines allow
                self._change.wait()
            batch, error = self._ready.pop(self._next_given)
            self._next_given += 1
            self._starving = False
            self._given_s = clock.now_s()
            self._change.notify_all()
        if error is not None:
            raise error
        return batch  # type: ignore[return-value]  # None only with an error, or if the reader returns it

    def _request(self) -> None:
        """Record that the trainer waits for the next batch."""
        if self._given_s is not None:
            self._step_s.append(clock.now_s() - self._given_s)
            self._given_s = None
        self._starving = self._next_given not in self._ready
        self._change.notify_all()

    @property
    def depth(self) -> int:
        """Number of steps to read ahead now."""
        if not self._step_s or not self._read_s:
            return _UNKNOWN_DEPTH
        wanted = max(1, ceil(self._prefetch_s / max(median(self._step_s), 1e-6)))
        return max(1, min(wanted, self._prefetch_bytes // max(self._batch_bytes, 1)))

    @property
    def width(self) -> int:
        """Number of concurrent reads: steps during one read, or all threads while the trainer waits."""
        if self._starving or not self._step_s or not self._read_s:
            return self._most
        return min(self._most, ceil(median(self._read_s) / max(median(self._step_s), 1e-6)) + 1)

    def _work(self) -> None:
        while True:
            with self._change:
                while not (self._closed or self._may_begin()):
                    self._change.wait()
                if self._closed:
                    return
                step = self._next_read
                self._next_read += 1
                self._running += 1
            begun_s = clock.now_s()
            batch, error, size_bytes = None, None, 0
            try:
                batch = self._read(step)
                size_bytes = n_bytes(batch)
            except BaseException as caught:  # raised where the step is requested
                error = caught
            with self._change:
                self._running -= 1
                self._read_s.append(clock.now_s() - begun_s)
                self._batch_bytes = max(self._batch_bytes, size_bytes)
                if not self._closed:
                    self._ready[step] = batch, error
                self._change.notify_all()

    def _may_begin(self) -> bool:
        n_ahead = self._next_read - self._next_given
        return self._next_read < self._last and n_ahead < self.depth and self._running < self.width


def n_bytes(value: Any) -> int:
    """Return the bytes of the arrays and tensors in a batch: in lists, tuples, mappings and attributes of objects.

    Each object counts once, and those without a size as 0.
    """
    total = 0
    seen = set[int]()
    left = [value]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        try:
            size_bytes = getattr(item, "nbytes", None)
            if isinstance(size_bytes, int):
                total += size_bytes
            elif isinstance(item, Mapping):
                left += item.values()
            elif isinstance(item, (list, tuple)):
                left += item
            else:
                left += getattr(item, "__dict__", {}).values()
        except Exception:  # an unknown type of the caller's must not end a run
            continue
    return total
