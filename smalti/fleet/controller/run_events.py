"""Records the checks and faults in the events of running runs in the ledger of their nodes, cordons the nodes, and
records the incidents, each with what was done."""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smalti.base import clock
from smalti.base.errors import SmaltiError
from smalti.base.log import get
from smalti.config.fleet import Priority
from smalti.fleet.agent.outcome import PAUSES
from smalti.fleet.controller.decide import Job, Move
from smalti.fleet.controller.lease import Lease
from smalti.fleet.ledger import cordons, records
from smalti.fleet.messages import incidents
from smalti.fleet.messages.incidents import Incident
from smalti.fleet.queue.runs import Attempt, Run
from smalti.fleet.queue.states import ACTIVE
from smalti.track.events import FILE_NAME, read_events

_EVERY_S = 2.0
_SKEW_S, _OTHER_SKEW_S = 0.5, 60.0
"""An event of an attempt may seem so much older than its start; the second by the clock of another machine."""
Event = Mapping[str, Any]


@dataclass(frozen=True)
class _New:
    """What the events of a run say that is not recorded yet."""

    job: Job
    size: int
    """Of the file of events."""
    events: Sequence[Event]
    """Checks and faults."""
    ended: Sequence[Sequence[Event]]
    """The events of each earlier attempt of ``smalti train`` that ended with a fault or failed a check."""


class RunEvents:
    """The events of runs that were recorded. A run that has ended is read once more, before its end is a move."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._sizes: dict[int, int] = {}
        self._looked_s: dict[int, float] = {}
        self._last: dict[int, list[Event]] = {}
        """By number of the run the events of the attempt of ``smalti train`` that began last."""

    def record(self, jobs: list[Job]) -> None:
        """Record the new events of runs that have an attempt, in one transaction."""
        news = [new for job in jobs if self._is_due(job) and (new := self._read(job)) is not None]
        if not news:
            return
        done: list[str | None] = []
        try:
            with self._lease.transaction() as db:
                for new in news:
                    done += _add(db, new)
        except (OSError, SmaltiError) as error:  # again in a moment
            get("fleet").warning("events of %s are not recorded: %s", ", ".join(new.job.run.id for new in news), error)
            return
        self._sizes |= {new.job.run.number: new.size for new in news}
        for what in filter(None, done):
            get("fleet").warning("%s", what)

    def _is_due(self, job: Job) -> bool:
        last, number = job.last, job.run.number
        if job.run.state not in ACTIVE or last is None or last.started_s is None or job.run.folder is None:
            return False
        is_due = clock.now_s() > self._looked_s.get(number, -_EVERY_S) + _EVERY_S
        if is_due or last.ended_s is not None:
            self._looked_s[number] = clock.now_s()
            return True
        return False

    def _read(self, job: Job) -> _New | None:
        """Read the events of a run, if there are new ones; None: nothing in them is to be recorded."""
        run, folder = job.run, Path(str(job.run.folder))
        file = folder / FILE_NAME
        try:
            size = file.stat().st_size if file.exists() else 0
            if size == self._sizes.get(run.number, 0):
                return None
            every = read_events(folder)
        except (OSError, SmaltiError) as error:  # again in a moment
            get("fleet").warning("events of %s are not recorded: %s", run.id, error)
            return None
        skew_s = _SKEW_S if run.engine == "local" else _OTHER_SKEW_S
        since_s = min(attempt.started_s for attempt in job.attempts if attempt.started_s is not None) - skew_s
        events = [event for event in every if (clock.seconds_of(event.get("time")) or 0.0) >= since_s]
        by_attempt: dict[Any, list[Event]] = {}
        for event in events:
            by_attempt.setdefault(event.get("attempt"), []).append(event)
        *earlier, self._last[run.number] = list(by_attempt.values()) or [[]]
        recorded = [event for event in events if event["event"] in (*records.FAULTS, records.CHECK)]
        ended = [of_attempt for of_attempt in earlier if _is_incident(of_attempt)]
        if recorded or ended:
            return _New(job, size, recorded, ended)
        self._sizes[run.number] = size
        return None

    def report(self, db: sqlite3.Connection, move: Move, last: Attempt | None) -> None:
        """Record the incident of a move, in its transaction: a fault of the ``last`` attempt, or a run that failed."""
        run = move.run
        if move.state not in ("RECOVERING", "FAILED") or last is None or last.started_s is None:
            return
        if run.member_of is not None:  # what has happened is in the events of its lead
            return
        events = self._last.get(run.number, [])
        ended = _last_of(events, "attempt_ended")
        if ended is None or (clock.seconds_of(ended.get("time")) or 0.0) < last.started_s - _SKEW_S:
            events = []  # those of an attempt before: this one has recorded nothing
        priority: Priority
        if move.state == "RECOVERING":
            priority, kind, action = "high", "run restarted", f"{run.id} is queued again, as attempt {last.number + 1}"
        else:
            priority, kind, action = "critical", "run failed", f"none: {run.id} is not started again"
        incident = Incident(
            f"{run.id}/queue-{last.number}", priority, kind, move.cause or "fault",
            move.detail or f"it ended with exit code {move.code}", action, last.node, run.cluster, run.id,
        )  # fmt: skip
        _report(db, incident, events)


def _add(db: sqlite3.Connection, new: _New) -> list[str | None]:
    """Record what is new; returns what was done with cordons, in words."""
    run, last = new.job.run, new.job.last
    node = None if last is None else last.node
    done = [records.add_event(db, run, node, event) for event in new.events]
    for of_attempt in new.ended:
        _report(db, _in_run(run, node), of_attempt)
    return done


def _is_incident(events: Sequence[Event]) -> bool:
    ended = _last_of(events, "attempt_ended")
    return (ended is not None and ended.get("cause") not in (None, *PAUSES)) or _unhealthy(events) is not None


def _in_run(run: Run, node: str | None) -> Incident:
    action = "smalti train has started the ranks again"
    return Incident(run.id, "normal", "ranks restarted", "fault", "", action, node, run.cluster, run.id)


def _report(db: sqlite3.Connection, incident: Incident, events: Sequence[Event]) -> None:
    """Record an incident with what the events of its attempt say of it."""
    ended, checked = _last_of(events, "attempt_ended"), _unhealthy(events)
    faults = (event for event in events if event["event"] in records.FAULTS and event.get("node"))
    if ended is not None:
        incident = replace(
            incident,
            node=next((str(event["node"]) for event in faults), incident.node),
            source=f"{incident.run}/{ended['attempt']}",
            reason=str(ended.get("cause") or incident.reason),
            message=str(ended.get("reason") or incident.message),
        )
    if checked is not None:
        node = str(checked["node"])
        is_cordoned = node in cordons.active(db)
        lines = [str(line) for line in checked.get("lines") or ()]
        incident = replace(
            incident,
            node=node,
            type="node cordoned" if is_cordoned else "node failed its check",
            priority="critical" if is_cordoned else incident.priority,
            message="; ".join([incident.message, *lines[-3:]])[:1000],
            action=f"{node} is {'' if is_cordoned else 'not '}cordoned; {incident.action}",
        )
    incidents.add(db, incident)


def _unhealthy(events: Sequence[Event]) -> Event | None:
    """Return the last check that failed; each node of an attempt may have one."""
    checks = [event for event in events if event["event"] == records.CHECK]
    return next((event for event in reversed(checks) if event.get("result") == "unhealthy"), None)


def _last_of(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in reversed(events) if event["event"] == kind), None)
