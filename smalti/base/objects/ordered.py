"""Calls in threads whose results come in the order of the items, with bounded memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def ordered(call: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[Iterator[R]]:
    """Context manager: an iterator over ``call(item)``, computed ahead by ``threads`` threads.

    At most ``threads + 1`` items and results are held. Raises the first error of a call or of the items; calls that are
    running then are waited for, others are not started.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="smalti-objects")

    def results() -> Iterator[R]:
        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(pool.submit(call, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)
