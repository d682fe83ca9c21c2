"""The lead's part in copies in memory: each node holds the shards of the one before it too, and a copy is completed on
every node before an attempt starts.

Of the copies that some node has lost a part of, the newest is used that is complete over all nodes together.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from smalti.base import clock, log
from smalti.fleet.neighbour.stream import Message
from smalti.fleet.nodes.copies import Copies
from smalti.track.checkpoints.names import step_of

_POLL_S = 0.05
_GATHER_S = 600.0
_TRIES = 3


class Member(Protocol):
    """A node with copies: this one, or one that has joined."""

    name: str

    @property
    def is_lost(self) -> bool: ...
    def report(self) -> Message:
        """Return its report (``Copies.report``); empty before the first."""

    def do(self, job: Message) -> None:
        """Begin a job there (``Copies.do``)."""


class LocalNode:
    """This node."""

    is_lost = False

    def __init__(self, name: str, copies: Copies) -> None:
        self.name = name
        self.report, self.do = copies.report, copies.do


class Replication:
    """Decides which copies the nodes hold."""

    def __init__(self, own: LocalNode) -> None:
        self._own = own
        self._numbers = itertools.count(1)
        self._job = 0
        self._holding: str | None = None
        """The copy that the nodes are fetching from each other."""
        self._kept: str | None = None
        """The newest that each node holds with the shards of the one before."""
        self._failed: str | None = None
        """The last that a node could not hold."""
        self._members: list[Member] = []
        """Nodes of the running attempt; empty between two."""
        self._change = threading.Lock()

    def begin(self, members: Sequence[Member]) -> None:
        """Replicate the copies of an attempt on these nodes from now on."""
        with self._change:
            self._members, self._holding = [self._own, *members], None

    def look(self) -> None:
        """Begin to replicate the newest copy where none is under way; called again and again."""
        with self._change:
            reports = [member.report() for member in self._members]
            if not reports or not all(reports):
                return
            if self._holding is not None:
                if all(report["job"] == self._job for report in reports):
                    self._end_hold(reports)
                return
            common = set.intersection(*(set(report["complete"]) for report in reports))
            newest = max(common, key=step_of, default=None)
            is_old = self._kept is not None and newest is not None and step_of(newest) <= step_of(self._kept)
            if newest is None or newest == self._failed or is_old:
                return
            self._job, self._holding = next(self._numbers), newest
            for index, member in enumerate(self._members):
                before = reports[index - 1]
                lacking = set(before["files"][newest]) - set(reports[index]["files"][newest])
                job = {"call": "hold", "job": self._job, "copy": newest}
                member.do({**job, "files": dict.fromkeys(sorted(lacking), before["address"])})

    def _end_hold(self, reports: Sequence[Message]) -> None:
        failures = [str(report["failure"]) for report in reports if report["failure"]]
        if failures:
            self._failed = self._holding
            log.get("fleet").warning("%s is not on two nodes: %s", self._holding, failures[0])
        else:
            self._kept = self._holding
            self._job = next(self._numbers)
            for member in self._members:
                member.do({"call": "keep", "job": self._job, "copy": self._kept})
        self._holding = None

    def gather(
        self, members: Sequence[Member], others: Sequence[Member], stops: Callable[[], bool] = lambda: False
    ) -> None:
        """Complete the newest possible copy on the nodes of the next attempt, before its ranks are started.

        others: nodes that are there and not of that attempt. stops: whether to wait no longer; copies are kept then.
        Where no copy is complete, the folders of the ranks are emptied, so that they use the disk.
        """
        with self._change:
            self._members = []
        users: list[Member] = [self._own, *members]
        sources = [*users, *others]
        for _ in range(_TRIES):
            self._run(sources, [{"call": "look"}] * len(sources), stops)
            if stops():
                return
            reports = [member.report() for member in sources if not member.is_lost]
            copy, places = _newest_whole(reports)
            jobs: list[Message] = []
            for member in users:
                has = member.report().get("files", {}).get(copy, ())
                lacks = {file: place for file, place in places.items() if file not in has}
                jobs.append({"call": "gather", "copy": copy, "files": lacks})
            if self._run(users, jobs, stops):
                self._kept = copy
                if copy is not None:
                    log.get("fleet").info("the copy of step %d is complete on %d nodes", step_of(copy), len(users))
                return
            if stops() or any(member.is_lost for member in users):  # the attempt ends at once; the copies are kept
                return
        self._run(users, [{"call": "gather", "copy": None, "files": {}}] * len(users), stops)
        self._kept = None

    def _run(self, members: Sequence[Member], jobs: Sequence[Message], stops: Callable[[], bool]) -> bool:
        """Do a job on each member, and wait for all, or for a stop; returns whether all have succeeded."""
        self._job, end_s = next(self._numbers), clock.now_s() + _GATHER_S
        for member, job in zip(members, jobs, strict=True):
            member.do({**job, "job": self._job})
        while clock.now_s() < end_s and not stops():
            reports = [member.report() for member in members if not member.is_lost]
            if all(report.get("job") == self._job for report in reports):
                return len(reports) == len(members) and not any(report["failure"] for report in reports)
            time.sleep(_POLL_S)
        return False


def _newest_whole(reports: Sequence[Message]) -> tuple[str | None, dict[str, str]]:
    """Return the newest copy of which each file is on a node, and of each file the address of one; None without any."""
    places: dict[str, dict[str, str]] = {}
    wholes: dict[str, set[str]] = {}
    for report in reports:
        for name, files in report.get("files", {}).items():
            wholes.setdefault(name, set()).update(report["all"][name])
            for file in files:
                places.setdefault(name, {}).setdefault(file, report["address"])
    names = [name for name in places if wholes[name] and wholes[name] <= places[name].keys()]
    copy = max(names, key=step_of, default=None)
    return copy, {} if copy is None else {file: places[copy][file] for file in wholes[copy]}
