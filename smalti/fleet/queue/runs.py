"""The rows of runs, attempts and events in the database of ``SMALTI_HOME``: read, and moved from state to state.

Every move is one compare-and-set with its event in the same transaction, so the events are the whole history, and of
two processes that move the same run one does nothing.
"""

import json
import platform
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base import clock, database
from smalti.base.env import user_folder
from smalti.base.errors import UserError, nearest
from smalti.base.processes import age_s
from smalti.config.clusters import Engine
from smalti.fleet.queue.states import ENDED, State, may_follow

SOURCES = ("user", "controller")
"""Who made an event."""


_UNFINISHED = f"SELECT number FROM fleet_runs WHERE host=? AND state NOT IN ({', '.join('?' * len(ENDED))})"


@dataclass(frozen=True)
class Hosts:
    """Where ssh may start a run: one of these, each with so many cores and GPUs."""

    names: tuple[str, ...]
    cores: int
    gpus: int
    options: tuple[str, ...] = ()
    """Arguments of ssh."""


@dataclass(frozen=True)
class Run:
    """A launched run; ``smalti/base/database.py`` has the columns."""

    number: int
    name: str
    cluster: str
    host: str
    """The machine that it was launched on, whose controller runs it."""
    state: State
    cause: str | None
    """Why it is in this state; in TERMINATING, why it was asked to stop."""
    code: int | None
    """Exit code of its last attempt that ended; minus the signal that killed it."""
    priority: int
    preemptible: bool
    max_duration_s: float | None
    retries: int
    retries_by_cause: dict[str, int]
    cores: int
    gpus: int
    command: tuple[str, ...]
    """The argument list; no shell reads it. ``{recipe}`` stands for the file of the recipe; on hosts ``{host}`` for the
    one of the attempt, and ``{lead}`` for the one of the run that it is a member of."""
    recipe: str | None
    """Text of the resolved recipe."""
    directory: str
    """Where it runs: relative paths of the recipe start there."""
    folder: str | None
    """Its run folder, absolute."""
    code_commit: str | None
    """Commit of Smalti's checkout, with ``+DIGEST`` of a packed copy; None: an installed version."""
    retried: dict[str, int]
    not_before_s: float
    time: str
    secrets: tuple[str, ...] = ()
    """Names of its secrets (``secret_values``)."""
    packed: str | None = None
    """Folder of the packed copy of Smalti that it runs; None: the one that was launched."""
    engine: Engine = "local"
    """What starts it."""
    hosts: Hosts | None = None
    """Of the engine ``ssh``, as they were when it was launched."""
    member_of: int | None = None
    """Number of the run on several hosts whose ranks it starts on another host; None: it is a run of its own."""

    @property
    def id(self) -> str:
        """Its name and number: ``demo-7``."""
        return f"{self.name}-{self.number}"

    @property
    def group(self) -> int:
        """Number of the run that it is a member of, or its own."""
        return self.number if self.member_of is None else self.member_of

    @property
    def place(self) -> Path:
        """Folder of its recipe and of the output of its attempts."""
        return place() / self.id

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will happen to it by itself."""
        return self.state in ENDED


@dataclass(frozen=True)
class Attempt:
    """An attempt. Its row is the intent to start it; the one process that claims its nonce does."""

    run: int
    number: int
    nonce: str
    gpus: tuple[int, ...]
    """GPUs that it holds."""
    pid: int | None
    """The process that watches it; None: not claimed yet."""
    process: str | None
    """Identity of that process (``base.processes.identity``)."""
    started_s: float | None
    ended_s: float | None
    code: int | None
    """Exit code; None if it is not known."""
    reason: str | None
    run_s: float | None = None
    """How long it has run, as its process has recorded last; None: an earlier version of Smalti recorded nothing."""
    node: str | None = None
    """The machine that it runs on; None: several, or not known (Slurm, earlier versions)."""

    def duration_s(self) -> float:
        """Return how long it has run, which does not depend on the clock of the day."""
        if self.started_s is None:
            return 0.0
        if self.ended_s is None:
            age = age_s(self.process)
            return (self.run_s or 0.0) if age is None else age
        return max(0.0, self.ended_s - self.started_s) if self.run_s is None else self.run_s


def place() -> Path:
    """Return the folder of recipes and output below ``SMALTI_HOME``."""
    return Path(user_folder()).absolute() / "fleet"


def this_host() -> str:
    """Return the name of this machine."""
    return platform.node() or "localhost"


def select(db: sqlite3.Connection, condition: str = "1", values: Sequence[Any] = ()) -> list[Run]:
    """Return the runs that fulfil a condition of SQL, the first launched first."""
    rows = db.execute(f"SELECT * FROM fleet_runs WHERE {condition} ORDER BY number", values)
    return [_run(row) for row in rows]


def get(db: sqlite3.Connection, reference: str) -> Run:
    """Return the run with this id, or this number. Raises UserError where there is none."""
    number = reference.rpartition("-")[2]
    rows = select(db, "number=?", (int(number),)) if number.isascii() and number.isdigit() and len(number) < 16 else []
    if rows and reference in (rows[0].id, number):
        return rows[0]
    ids = [run.id for run in select(db)]
    close = nearest(reference, ids)
    raise UserError(
        f"there is no run '{reference}' in the queue",
        allowed="ids of 'smalti fleet ls'",
        hint=f"did you mean '{close}'?" if close else "smalti fleet ls",
    )


def members_of(db: sqlite3.Connection, run: int) -> list[Run]:
    """Return the members of a run on several hosts."""
    return select(db, "member_of=?", (run,))


def unfinished(db: sqlite3.Connection, host: str) -> list[Run]:
    """Return the runs of a machine that have not ended."""
    return select(db, f"number IN ({_UNFINISHED})", (host, *ENDED))


def are_unfinished(db: sqlite3.Connection, host: str) -> bool:
    """Return whether runs of a machine have not ended."""
    return db.execute(f"{_UNFINISHED} LIMIT 1", (host, *ENDED)).fetchone() is not None


def attempts(db: sqlite3.Connection, run: int) -> list[Attempt]:
    """Return the attempts of a run, the first first."""
    rows = db.execute("SELECT * FROM fleet_attempts WHERE run=? ORDER BY number", (run,))
    return [_attempt(row) for row in rows]


def attempt_of(db: sqlite3.Connection, nonce: str) -> Attempt | None:
    """Return the attempt with this nonce."""
    row = db.execute("SELECT * FROM fleet_attempts WHERE nonce=?", (nonce,)).fetchone()
    return None if row is None else _attempt(row)


def attempts_of_unfinished(db: sqlite3.Connection, host: str) -> dict[int, list[Attempt]]:
    """Return the attempts of all runs of a machine that have not ended, by number of the run."""
    grouped: dict[int, list[Attempt]] = {}
    for row in db.execute(f"SELECT * FROM fleet_attempts WHERE run IN ({_UNFINISHED}) ORDER BY number", (host, *ENDED)):
        grouped.setdefault(row["run"], []).append(_attempt(row))
    return grouped


def needs_of_pending(db: sqlite3.Connection, host: str) -> dict[int, list[State]]:
    """Return the states of the runs that each PENDING run of a machine depends on, by its number."""
    grouped: dict[int, list[State]] = {}
    rows = db.execute(
        "SELECT run, needed.state FROM fleet_dependencies JOIN fleet_runs AS needed ON needed.number=needs "
        "WHERE run IN (SELECT number FROM fleet_runs WHERE host=? AND state='PENDING')",
        (host,),
    )
    for row in rows:
        grouped.setdefault(row["run"], []).append(row["state"])
    return grouped


def needed_by(db: sqlite3.Connection, run: int) -> list[str]:
    """Return the ids of the runs that must be completed before ``run``."""
    needed = select(db, "number IN (SELECT needs FROM fleet_dependencies WHERE run=?)", (run,))
    return [each.id for each in needed]


def events(db: sqlite3.Connection, run: int) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first."""
    rows = db.execute(
        "SELECT number, attempt, time, state, cause, source, detail FROM fleet_events WHERE run=? ORDER BY number",
        (run,),
    )
    return [dict(row) for row in rows]


def read(reference: str) -> Run:
    """Return the run with this id, in a transaction of its own."""
    with database.transaction(write=False) as db:
        return get(db, reference)


def move(
    db: sqlite3.Connection,
    run: Run,
    state: State,
    *,
    cause: str | None,
    source: str,
    attempt: int | None = None,
    detail: str | None = None,
    **columns: Any,
) -> bool:
    """Move ``run`` to another state, with its event; returns False where it has moved since ``run`` was read.

    ``columns``: other columns of the run to set.
    """
    assert may_follow(run.state, state), f"{run.id}: {run.state} -> {state}"
    assert source in SOURCES, source
    values = {"state": state, "cause": cause, **columns}
    done = db.execute(
        f"UPDATE fleet_runs SET {', '.join(f'{name}=?' for name in values)} WHERE number=? AND state=? AND cause IS ?",
        (*values.values(), run.number, run.state, run.cause),
    )
    if done.rowcount == 0:
        return False
    write_event(db, run.number, state, cause=cause, source=source, attempt=attempt, detail=detail)
    return True


def write_event(
    db: sqlite3.Connection,
    run: int,
    state: State,
    *,
    cause: str | None,
    source: str,
    attempt: int | None = None,
    detail: str | None = None,
) -> None:
    """Append an event."""
    db.execute(
        "INSERT INTO fleet_events (run, attempt, time, state, cause, source, detail) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (run, attempt, clock.utc_text(), state, cause, source, detail),
    )


def _run(row: sqlite3.Row) -> Run:
    values = dict(row)
    for name in ("retries_by_cause", "retried"):
        values[name] = json.loads(values[name])
    values |= {"command": tuple(json.loads(values["command"])), "preemptible": bool(values["preemptible"])}
    values["secrets"] = tuple(json.loads(values["secrets"]))
    if values["hosts"] is not None:
        hosts = json.loads(values["hosts"])
        values["hosts"] = Hosts(tuple(hosts["names"]), hosts["cores"], hosts["gpus"], tuple(hosts["options"]))
    return Run(**values)


def _attempt(row: sqlite3.Row) -> Attempt:
    values = dict(row)
    return Attempt(**values | {"gpus": tuple(json.loads(values["gpus"]))})
