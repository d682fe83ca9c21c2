"""The loop of the controller: read the rows, look at the processes, make the moves that follow, start and stop.

What it does to processes may be done twice without harm: of all processes that are started for an attempt one claims
its nonce and the others end; a run that is stopping is asked to stop again. So a controller that is killed between a
move and its effect leaves nothing to undo.
"""

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import time
from contextlib import suppress

from smalti.base import clock
from smalti.base.env import any_process_with
from smalti.base.errors import RetryableError
from smalti.base.log import get
from smalti.base.processes import is_running
from smalti.fleet.controller.decide import Job, Move, Sight, decide
from smalti.fleet.controller.lease import Lease, Superseded
from smalti.fleet.controller.run_events import RunEvents
from smalti.fleet.controller.start import NONCE, start_attempt
from smalti.fleet.ledger import cordons
from smalti.fleet.messages.outbox import Sender
from smalti.fleet.queue import runs, secret_values
from smalti.fleet.queue.runs import Attempt
from smalti.fleet.queue.schedule import Room
from smalti.fleet.queue.states import ACTIVE

_POLL_S = 0.2
_DISK_WAIT_S = 5.0
_START_TRIES = 3


class Controller:
    """Controls the runs of this machine while it has the lease."""

    def __init__(self, lease: Lease, room: Room) -> None:
        """room: cores and GPUs of this machine."""
        self._lease = lease
        self._room = room
        self._events = RunEvents(lease)
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """Processes that this controller started, by the nonce of their attempt."""
        self._tries: dict[str, int] = {}
        self._stopped: set[str] = set()
        """Nonces of attempts that this controller has asked to stop."""

    def run(self) -> None:
        """Control the runs until all have ended, or another controller has taken over."""
        sender = Sender()
        sender.start()
        try:
            while True:
                try:
                    if self.round():
                        continue
                    if self._lease.release_if_idle():
                        return
                    wait_s = _POLL_S
                except (RetryableError, OSError) as error:  # a full disk, a lock, no process: runs continue without us
                    get("fleet").error("%s", error)
                    wait_s = _DISK_WAIT_S
                time.sleep(wait_s)
        except Superseded as error:
            get("fleet").warning("%s; this one ends", error)
        finally:
            sender.finish()

    def round(self) -> bool:
        """Do one round; returns whether runs have moved. Only a round without moves acts on processes, in a state that
        is recorded."""
        with self._lease.transaction(write=False) as db:
            jobs, cordoned = _jobs(db, self._lease.host), cordons.active(db)
        jobs = [self._looked_at(job) for job in jobs]
        self._events.record(jobs)
        moves = decide(jobs, self._room, clock.wall_s(), cordoned)
        if not moves:
            self._lease.renew()
            self._act(jobs)
            return False
        last = {job.run.number: job.last for job in jobs}
        with self._lease.transaction() as db:
            for move in moves:
                if _apply(db, move):
                    self._events.report(db, move, last[move.run.number])
        return True

    def _looked_at(self, job: Job) -> Job:
        last = job.last
        if job.run.state not in ACTIVE or last is None or last.ended_s is not None:
            return job
        ran_s = sum(attempt.duration_s() for attempt in job.attempts)
        return Job(job.run, job.attempts, job.needs, self._sight(last), ran_s)

    def _sight(self, attempt: Attempt) -> Sight | None:
        if attempt.pid is None:
            tried = self._tries.get(attempt.nonce, 0) >= _START_TRIES and attempt.nonce not in self._started
            return "not_starting" if tried else "unclaimed"
        if is_running(attempt.pid, attempt.process):
            return "running"
        # Its run was asked to save and end by the kernel; until it has, the run folder is in use.
        return None if any_process_with(NONCE, attempt.nonce) else "gone"

    def _act(self, jobs: list[Job]) -> None:
        """Start the attempts that no process has claimed, and ask those to stop that should."""
        for nonce, process in list(self._started.items()):
            if process.poll() is not None:
                del self._started[nonce]
        for job in jobs:
            last = job.last
            if job.sight == "unclaimed" and job.run.state == "STARTING":
                assert last is not None
                if last.nonce not in self._started:
                    self._tries[last.nonce] = self._tries.get(last.nonce, 0) + 1
                    self._started[last.nonce] = start_attempt(last.nonce)
            elif job.sight == "running" and job.run.state == "TERMINATING":
                assert last is not None
                self._stop(last)

    def _stop(self, attempt: Attempt) -> None:
        if attempt.nonce not in self._stopped and attempt.pid is not None:
            self._stopped.add(attempt.nonce)
            with suppress(ProcessLookupError):
                os.kill(attempt.pid, signal.SIGTERM)


def _jobs(db: sqlite3.Connection, host: str) -> list[Job]:
    """Return the unfinished runs of a machine."""
    attempts, needs = runs.attempts_of_unfinished(db, host), runs.needs_of_pending(db, host)
    return [
        Job(run, tuple(attempts.get(run.number, ())), tuple(needs.get(run.number, ())))
        for run in runs.unfinished(db, host)
    ]


def _apply(db: sqlite3.Connection, move: Move) -> bool:
    """Make a move, unless its run or attempt has changed since the rows were read; returns whether it was made."""
    now_s, run = clock.wall_s(), move.run
    if move.ends is not None:
        ended = db.execute(
            "UPDATE fleet_attempts SET ended_s=?, run_s=?, code=?, reason=? "
            "WHERE nonce=? AND ended_s IS NULL AND pid IS ?",
            (now_s, move.ends.duration_s(), move.code, move.detail, move.ends.nonce, move.ends.pid),
        )
        if ended.rowcount == 0:  # it was claimed, or has recorded its own end
            return False
    columns: dict[str, object] = {}
    if move.state == "RECOVERING":
        columns |= {"not_before_s": now_s + move.wait_s, "retried": json.dumps(move.retried)}
    if move.code is not None:
        columns["code"] = move.code
    moved = runs.move(
        db, run, move.state, cause=move.cause, source="controller", attempt=move.attempt, detail=move.detail, **columns
    )
    if moved and move.state == "COMPLETED":
        secret_values.forget(run.number)
    if moved and move.gpus is not None:
        db.execute(
            "INSERT INTO fleet_attempts (run, number, nonce, gpus, node) VALUES (?, ?, ?, ?, ?)",
            (run.number, move.attempt, secrets.token_hex(16), json.dumps(move.gpus), move.node),
        )
    return moved
