"""Records the checks and faults in the events of running runs in the ledger of their nodes, and cordons the nodes."""

from pathlib import Path

from smalti.base import clock
from smalti.base.errors import SmaltiError
from smalti.base.log import get
from smalti.fleet.controller.decide import Job
from smalti.fleet.controller.lease import Lease
from smalti.fleet.ledger import records
from smalti.fleet.queue.states import ACTIVE
from smalti.track.events import FILE_NAME, read_events

_EVERY_S = 2.0
_MARGIN_S = 60.0
"""An event of an attempt may seem so much older than its start, by the clock of another machine."""


class RunEvents:
    """The events of runs that were recorded. A run that has ended is read once more, before its end is a move."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._sizes: dict[int, int] = {}
        self._looked_s: dict[int, float] = {}

    def record(self, jobs: list[Job]) -> None:
        """Record the new events of runs that have an attempt."""
        for job in jobs:
            last, number = job.last, job.run.number
            if job.run.state not in ACTIVE or last is None or last.started_s is None or job.run.folder is None:
                continue
            is_due = clock.now_s() > self._looked_s.get(number, -_EVERY_S) + _EVERY_S
            if is_due or last.ended_s is not None:
                self._looked_s[number] = clock.now_s()
                try:
                    self._read(job, Path(job.run.folder))
                except (OSError, SmaltiError) as error:  # the folder, or the database: again in a moment
                    get("fleet").warning("events of %s are not recorded: %s", job.run.id, error)

    def _read(self, job: Job, folder: Path) -> None:
        file = folder / FILE_NAME
        size = file.stat().st_size if file.exists() else 0
        if size == self._sizes.get(job.run.number, 0):
            return
        since_s = min(attempt.started_s for attempt in job.attempts if attempt.started_s is not None) - _MARGIN_S
        events = [event for event in read_events(folder) if (clock.seconds_of(event.get("time")) or 0.0) >= since_s]
        assert job.last is not None
        with self._lease.transaction() as db:
            done = [records.add_event(db, job.run, job.last.node, event) for event in events]
        self._sizes[job.run.number] = size
        for what in filter(None, done):
            get("fleet").warning("%s", what)
