"""A node that has joined a run, and its ranks, as the lead sees them."""

import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from smalti.base import clock
from smalti.base.errors import DataError
from smalti.base.units import format_seconds
from smalti.fleet.launch.local import Rank
from smalti.fleet.neighbour import stream
from smalti.fleet.neighbour.stream import LOST, Message


class Node:
    """A node that has joined."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.why: str | None = None
        """Why it was lost; None while it is there."""
        self.is_leaving = False
        """It is to be stopped: the run is to continue without it."""
        self.is_suspect = False
        """A rank on it keeps failing: others are chosen first."""
        self._connection = connection
        self._sending = threading.Lock()
        self._received_s = clock.now_s()
        self._lost_s: float | None = None
        self._status: Message = {}
        self._copies: Message = {}
        self._asked = 0
        self._answer: Message = {}

    @property
    def silent_s(self) -> float:
        """Seconds since the last message from it; of one that was lost, until then."""
        return (self._lost_s or clock.now_s()) - self._received_s

    @property
    def is_lost(self) -> bool:
        """Whether it was lost."""
        return self.why is not None

    def report(self) -> Message:
        """Return what it has reported about its copies in memory (``Copies.report``)."""
        return self._copies

    def do(self, job: Message) -> None:
        """Begin a job on its copies (``Copies.do``)."""
        self.send({"do": "copies", "job": job})

    def status(self, number: int) -> Message:
        """Return what it has reported about the ranks of this start; empty before."""
        status = self._status
        return status if status.get("start") == number else {}

    def ask(self, request: Message) -> int:
        """Send a request that takes some time, and return its number."""
        self._asked += 1
        self.send({**request, "number": self._asked})
        return self._asked

    def answer(self, number: int) -> Message | None:
        """Return the answer to the request of this number, the last one; None before it has arrived."""
        return self._answer if self._answer.get("number") == number else None

    def listen(self, lease_s: float) -> None:
        """Receive its reports until it is lost."""
        try:
            while True:
                message = stream.receive_message(self._connection)
                self._received_s = clock.now_s()
                self.is_leaving = self.is_leaving or bool(message.get("leaves"))
                self._copies = {**self._copies, **message.get("copies", {})}  # only what has changed is sent
                self._answer = message.get("answer") or self._answer
                self._status = message
        except BlockingIOError:
            self.lose(f"it was silent for {format_seconds(lease_s)}")
        except DataError as error:
            self.lose(error.message)
        except LOST as error:
            self.lose(f"its agent ended, or the connection broke ({type(error).__name__})")

    def lose(self, why: str) -> None:
        """Send and believe nothing more."""
        self._lost_s = self._lost_s or clock.now_s()
        self.why = self.why or why
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as shared:
            shared.shutdown(socket.SHUT_RDWR)  # ends a read of another thread too

    def send(self, message: Message) -> None:
        """Send a message; a failure is the loss of the node."""
        if self.why is not None:
            return
        try:
            with self._sending:
                stream.send_message(self._connection, message)
        except LOST as error:
            self.lose(f"nothing can be sent to it: {error}")


@dataclass(kw_only=True)
class RemoteRank(Rank):
    """A rank that the agent of another node has started."""

    agent: Node
    number: int
    """Of the start."""
    index: int
    """Among the ranks of its node."""

    @property
    def pid(self) -> int:
        return int(self._of("pids") or 0)

    @property
    def code(self) -> int | None:
        code: int | None = self._of("codes")
        return -signal.SIGKILL if code is None and self.agent.why is not None else code

    @property
    def has_ended(self) -> bool:
        """Whether its end was reported."""
        return self._of("codes") is not None

    @property
    def is_stopped(self) -> bool:
        return bool(self._of("stopped"))

    def send(self, number: signal.Signals) -> None:
        self.agent.send({"do": "signal", "start": self.number, "rank": self.index, "signal": int(number)})

    def kill(self) -> None:
        self.killed_by_us = self.killed_by_us or self.code is None
        self.agent.send({"do": "kill", "start": self.number, "rank": self.index})

    def _of(self, name: str):  # type: ignore[no-untyped-def]
        values = self.agent.status(self.number).get(name)
        return None if values is None else values[self.index]
