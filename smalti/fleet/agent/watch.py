"""Watches the ranks of an attempt until none is left."""

import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base import clock
from smalti.base.errors import ExitCode
from smalti.fleet.agent import evidence
from smalti.fleet.agent.pauses import Pause, Pauses
from smalti.fleet.agent.requests import StopRequests
from smalti.fleet.agent.watchdog import Hang, Limits, Watchdog
from smalti.fleet.launch.local import LOST_PEER, LocalRank, Rank
from smalti.track.progress import Progress, read_slots

if TYPE_CHECKING:
    from smalti.fleet.nodes.lead import Nodes
    from smalti.fleet.nodes.node import Node

_POLL_S = 0.05
_KILL_WAIT_S = 4.0
_ANSWERS = (ExitCode.USAGE, ExitCode.CHECK_FAILED)
UNSAVED = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a rank that was asked to stop before it trained."""


class Watch:
    """Polls the ranks until none is left."""

    def __init__(
        self,
        ranks: list[Rank],
        requests: StopRequests,
        grace_s: float,
        stop_s: float,
        progress: Path,
        limits: Limits | None = None,
        pauses: Pauses | None = None,
        nodes: "Nodes | None" = None,
    ) -> None:
        """progress: the file with the slots of the ranks. limits: of phases; None: hangs are not detected. pauses: of
        the attempt; None: it is ended for none. nodes: the other ones of the attempt."""
        self.ranks = ranks
        self.requests = requests
        self.deaths: list[Rank] = []
        """Ranks that did not end with 0, in the order in which that was seen."""
        self.stopped_by: signal.Signals | None = None
        self.out_of_time = False
        self.left: list[Rank] = []
        """Ranks that had to be killed; if some of them are stopped (SIGSTOP), these alone."""
        self.any_stopped = False
        self.slots: dict[int, Progress] = {}
        """Slots of the ranks when a fault was seen."""
        self.detected_s: dict[int, float] = {}
        """Rank -> seconds from its end, at most, until that was seen."""
        self.decided_s: float | None = None
        """Time (``clock.now_s``) of the first fault that was seen, which ends the attempt."""
        self.hang: Hang | None = None
        self.pause: Pause | None = None
        """Why the ranks were asked to save and end, if not by a request."""
        self.evidence: str | None = None
        """Name of the file with the evidence of a hang."""
        self.lost: Node | None = None
        """The node that was lost; its ranks and the others are killed."""
        self._nodes = nodes
        self._watchdog = None if limits is None else Watchdog(limits, self._read_slots)
        self._pauses = pauses
        self._progress, self._looked_s = progress, clock.now_s()
        self._grace_s, self._stop_s = grace_s, stop_s
        self._kill_at_s: float | None = None

    def wait(self) -> None:
        """Wait until all ranks have ended, or until the others must be killed."""
        while any(rank.code is None for rank in self.ranks):
            if self._loses_a_node():
                return
            self._forward()
            self._collect_deaths()
            if self.requests.interrupts > 1 or self._hangs():
                return
            if self._kill_at_s is not None and clock.now_s() >= self._kill_at_s:
                self.out_of_time = self.stopped_by is not None and not self._causes()
                return
            self._looked_s = clock.now_s()
            time.sleep(_POLL_S)
        if not self._loses_a_node():
            self._collect_deaths()

    def _read_slots(self) -> list[Progress]:
        local: list[Progress] = []
        with suppress(OSError):  # the file system does not answer
            local = read_slots(self._progress)
        return local + ([] if self._nodes is None else self._nodes.slots())

    def _loses_a_node(self) -> bool:
        """Return whether a node of the attempt was lost; none of its ranks is blamed, as their state is unknown."""
        self.lost = None if self._nodes is None else self._nodes.lost()
        if self.lost is None:
            return False
        self.decided_s = clock.now_s() if self.decided_s is None else self.decided_s
        for rank in self.ranks:
            rank.killed_by_us = rank.killed_by_us or rank.node == self.lost.name
        return True

    def _hangs(self) -> bool:
        """Return whether a rank hangs; it is named, and the evidence written. A stop has its own time limit."""
        if self._watchdog is None or self.deaths or self.stopped_by is not None:
            return False
        if self._nodes is not None and self._nodes.any_silent():  # its ranks may still run: the others wait for them
            return False
        slots = self._watchdog.look(self.ranks)
        if not slots:
            return False
        self.decided_s = clock.now_s()
        folder = self._progress.parent
        here = [rank for rank in self.ranks if isinstance(rank, LocalRank)]
        look_here = partial(evidence.look, here, folder)
        seen = look_here() if self._nodes is None else self._nodes.look(look_here)
        self.hang = self._watchdog.name(slots, self.ranks, seen)
        self.evidence = evidence.write(folder, slots, self.ranks, seen)
        return True

    def kill_all(self) -> None:
        """Kill the ranks that are left (SIGKILL), and wait for them."""
        running = [rank for rank in self.ranks if rank.code is None]
        stopped = [rank for rank in running if rank.is_stopped]
        self.left = stopped or running
        self.any_stopped = bool(stopped)
        for rank in self.ranks:
            rank.kill()
        end_s = clock.now_s() + _KILL_WAIT_S
        while clock.now_s() < end_s and any(rank.code is None for rank in self.ranks):
            time.sleep(_POLL_S)

    def cause(self) -> Rank | None:
        """Return the rank that caused the end: by signal, exit code, 75, lost peer, in this order; else the first."""
        blamed = self._causes()
        return min(blamed, key=_blame_order) if blamed else None

    def step_of(self, rank: int | None, default: int) -> int:
        """Return the finished steps of a rank; ``default`` where its slot is not known."""
        return default if rank is None or rank not in self.slots else self.slots[rank].step

    def _causes(self) -> list[Rank]:
        expected: set[int] = {ExitCode.RETRY, ExitCode.INTERRUPTED, *UNSAVED} if self.stopped_by else set()
        if any(rank.code in UNSAVED for rank in self.deaths):
            expected |= {LOST_PEER} if self.stopped_by else set()  # it lost a rank that was asked to stop
        return [rank for rank in self.deaths if not rank.killed_by_us and rank.code not in expected]

    def _forward(self) -> None:
        """Forward the first request to stop, or ask for a save where there is a reason to pause; a Ctrl-C after a
        SIGTERM is forwarded too."""
        if self._pauses is not None and self.stopped_by is None and not self.deaths:
            self.pause = self._pauses.look()
        terminates = self.requests.terminations or self.pause is not None
        wanted = signal.SIGINT if self.requests.interrupts else signal.SIGTERM if terminates else None
        if wanted is None or wanted == self.stopped_by:
            return
        self.stopped_by = wanted
        for rank in self.ranks:
            rank.send(wanted)
        self._kill_by(self._stop_s)

    def _collect_deaths(self) -> None:
        for rank in self.ranks:
            if rank.code not in (None, 0) and rank not in self.deaths:
                self.deaths.append(rank)
                self.decided_s = clock.now_s() if self.decided_s is None else self.decided_s
                self.detected_s[rank.rank] = clock.now_s() - self._looked_s
                self.slots = self.slots or {slot.rank: slot for slot in self._read_slots()}
                if rank.code in UNSAVED and self.stopped_by:
                    self._kill_by(self._grace_s)  # it was not training yet, and the others wait for it
                elif rank in self._causes():
                    # All ranks end with 2 or 3 together, and rank 0 may still be recording it.
                    self._kill_by(self._grace_s * (2 if rank.code in _ANSWERS else 1))

    def _kill_by(self, seconds: float) -> None:
        due_s = clock.now_s() + seconds
        self._kill_at_s = due_s if self._kill_at_s is None else min(self._kill_at_s, due_s)


def _blame_order(rank: Rank) -> int:
    assert rank.code is not None
    if rank.code == -signal.SIGABRT:
        return 1  # a library aborts when its peer is gone
    return 0 if rank.code < 0 else {ExitCode.RETRY: 3, LOST_PEER: 4}.get(rank.code, 2)
