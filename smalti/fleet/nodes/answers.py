"""Requests of the lead that take a node some time, answered from a thread: the side of a node that has joined."""

import queue
import threading
from collections.abc import Callable

from smalti.fleet.neighbour.stream import Message


class Answers:
    """The answers that are ready; each is sent once."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def start(self, request: Message, work: Callable[[], Message]) -> None:
        """Begin ``work``, whose result is the answer."""
        run = lambda: self._ready.put({**work(), "number": request["number"]})  # noqa: E731
        threading.Thread(target=run, name=request["do"], daemon=True).start()

    def take(self) -> Message | None:
        """Return an answer that is ready; None without one."""
        return None if self._ready.empty() else self._ready.get()
