"""A command that checks the nodes of an attempt, run on all of them at once: the side of a node that has joined."""

import threading

from smalti.fleet.agent.health import run
from smalti.fleet.neighbour.stream import Message


class CheckHere:
    """Runs the check that the lead asks for, while the session with the lead lasts."""

    def __init__(self, ended: threading.Event) -> None:
        self._ended = ended
        self.report: Message = {}
        """The number of the last check that has ended, and its exit code (None: it did not end in time)."""

    def start(self, request: Message) -> None:
        """Begin a check."""
        threading.Thread(target=self._run, args=(request,), name="check", daemon=True).start()

    def _run(self, request: Message) -> None:
        code = run(request["command"], request["limit_s"], request["file"], self._ended.is_set, request["environment"])
        self.report = {"number": request["number"], "code": code}
