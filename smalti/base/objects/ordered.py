"""Calls in threads whose results come in the order of the items, with bounded memory."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered(call: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield ``call(item)`` in the order of the items, ``threads`` at a time, with as many items and results held.

    Raises the first error of a call or of the items; calls that are running then end by themselves. The threads are
    daemons, so a process can end while a store does not answer (those of an executor would be waited for).
    """
    pending: deque[Future[R]] = deque()
    for item in items:
        if len(pending) == threads:
            yield pending.popleft().result()
        pending.append(_start(call, item))
    while pending:
        yield pending.popleft().result()


def _start(call: Callable[[T], R], item: T) -> "Future[R]":
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(call(item))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="smalti-objects", daemon=True).start()
    return future
