"""The lease that makes one process the controller of a machine.

Every transaction of a controller checks its token, which grows with each takeover. A controller that was stopped, and
wakes after another has taken over, changes nothing more.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from smalti.base import clock, database
from smalti.base.processes import identity, is_running
from smalti.fleet.queue.runs import are_unfinished

LEASE_S = 15.0
"""A controller that runs but has not renewed for so long is taken for stopped, and replaced."""


class Superseded(Exception):
    """Another process has become the controller."""


class Lease:
    """The right of this process to act as the controller of ``host``."""

    def __init__(self, host: str, token: int) -> None:
        self.host = host
        self.token = token
        self._renewed_s = clock.wall_s()

    @classmethod
    def take(cls, host: str, *, lease_s: float = LEASE_S) -> "Lease | None":
        """Become the controller of ``host``; None while another one is."""
        with database.transaction() as db:
            row = _row(db, host)
            if _is_held(row, lease_s):
                return None
            token = 1 if row is None else int(row["token"]) + 1
            values = (host, token, os.getpid(), identity(os.getpid()), clock.wall_s())
            db.execute("INSERT OR REPLACE INTO fleet_controllers VALUES (?, ?, ?, ?, ?)", values)
        return cls(host, token)

    @contextmanager
    def transaction(self, *, write: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction of the controller; a write renews the lease. Raises Superseded where it has been lost."""
        with database.transaction(write=write) as db:
            row = _row(db, self.host)
            if row is None or row["token"] != self.token or row["pid"] is None:
                raise Superseded(f"another controller of {self.host} has taken over")
            if write:
                self._renewed_s = clock.wall_s()
                db.execute("UPDATE fleet_controllers SET renewed_s=? WHERE host=?", (self._renewed_s, self.host))
            yield db

    def renew(self) -> None:
        """Renew the lease if it is due."""
        if abs(clock.wall_s() - self._renewed_s) > LEASE_S / 4:
            with self.transaction():
                pass

    def release_if_idle(self) -> bool:
        """Give the lease back if every run has ended; returns whether it did.

        A launch either comes before, and is seen here, or after, and then finds no controller and starts one.
        """
        with self.transaction(write=False) as db:
            if are_unfinished(db, self.host):
                return False
        with self.transaction() as db:
            if are_unfinished(db, self.host):
                return False
            db.execute("UPDATE fleet_controllers SET pid=NULL, process=NULL WHERE host=?", (self.host,))
        return True


def is_needed(host: str) -> bool:
    """Return whether runs wait for a controller of ``host``, and none runs."""
    with database.transaction(write=False) as db:
        return are_unfinished(db, host) and not _is_held(_row(db, host), LEASE_S)


def holder(host: str) -> int | None:
    """Return the process id of the controller of ``host``; None where none runs."""
    with database.transaction(write=False) as db:
        row = _row(db, host)
        return int(row["pid"]) if row is not None and _is_held(row, LEASE_S) else None


def _row(db: sqlite3.Connection, host: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = db.execute("SELECT * FROM fleet_controllers WHERE host=?", (host,)).fetchone()
    return row


def _is_held(row: sqlite3.Row | None, lease_s: float) -> bool:
    return (
        row is not None
        and is_running(row["pid"], row["process"])
        and abs(clock.wall_s() - float(row["renewed_s"])) < lease_s
    )
