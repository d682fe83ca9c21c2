"""The database of ``SMALTI_HOME``: one SQLite file for what outlives a run, shared by all commands of a user.

Guarantees: a transaction is applied whole or not at all; processes wait for each other, up to 30 s; the tables are
created and changed by ``MIGRATIONS`` alone, under a lock, and a file of a newer Smalti is an error and stays unchanged.
Nothing that a run needs to resume is kept here.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from smalti.base import env, store
from smalti.base.disk import room, writing
from smalti.base.errors import DataError, RetryableError, SmaltiError, UserError

FILE_NAME = "smalti.db"
_WAIT_S = 30.0
_RETRY_S = 0.02
_HOME_HINT = "choose another folder: export SMALTI_HOME=FOLDER"
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "fuse")
"""Beginnings of the types of file systems that several machines may share."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (  # 1: the model registry, see track/registry
        "CREATE TABLE models (name TEXT PRIMARY KEY, last_version INTEGER NOT NULL)",
        """CREATE TABLE model_versions (
            name TEXT NOT NULL REFERENCES models (name), version INTEGER NOT NULL,
            kind TEXT NOT NULL, path TEXT NOT NULL, digest TEXT NOT NULL,
            run TEXT, run_folder TEXT, step INTEGER, tokens INTEGER,
            data TEXT NOT NULL, scores TEXT NOT NULL, time TEXT NOT NULL,
            PRIMARY KEY (name, version))""",
        "CREATE INDEX model_versions_by_path ON model_versions (path)",
        """CREATE TABLE model_tags (
            name TEXT NOT NULL, tag TEXT NOT NULL, version INTEGER NOT NULL,
            PRIMARY KEY (name, tag),
            FOREIGN KEY (name, version) REFERENCES model_versions (name, version))""",
        """CREATE TABLE model_tag_moves (
            name TEXT NOT NULL, tag TEXT NOT NULL, from_version INTEGER, to_version INTEGER, time TEXT NOT NULL)""",
    ),
    (  # 2: runs of the fleet, see fleet/queue; times are seconds since 1970
        """CREATE TABLE fleet_runs (
            number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, cluster TEXT NOT NULL, host TEXT NOT NULL,
            state TEXT NOT NULL, cause TEXT, code INTEGER,
            priority INTEGER NOT NULL, preemptible INTEGER NOT NULL, max_duration_s REAL,
            retries INTEGER NOT NULL, retries_by_cause TEXT NOT NULL, cores INTEGER NOT NULL, gpus INTEGER NOT NULL,
            command TEXT NOT NULL, recipe TEXT, directory TEXT NOT NULL, folder TEXT, code_commit TEXT,
            retried TEXT NOT NULL, not_before_s REAL NOT NULL, time TEXT NOT NULL)""",
        "CREATE INDEX fleet_runs_by_state ON fleet_runs (host, state)",
        """CREATE TABLE fleet_dependencies (
            run INTEGER NOT NULL REFERENCES fleet_runs (number), needs INTEGER NOT NULL REFERENCES fleet_runs (number),
            PRIMARY KEY (run, needs))""",
        """CREATE TABLE fleet_attempts (
            run INTEGER NOT NULL REFERENCES fleet_runs (number), number INTEGER NOT NULL,
            nonce TEXT NOT NULL UNIQUE, gpus TEXT NOT NULL, pid INTEGER, process TEXT,
            started_s REAL, ended_s REAL, code INTEGER, reason TEXT,
            PRIMARY KEY (run, number))""",
        """CREATE TABLE fleet_events (
            number INTEGER PRIMARY KEY AUTOINCREMENT, run INTEGER NOT NULL REFERENCES fleet_runs (number),
            attempt INTEGER, time TEXT NOT NULL, state TEXT NOT NULL, cause TEXT, source TEXT NOT NULL, detail TEXT)""",
        "CREATE INDEX fleet_events_by_run ON fleet_events (run)",
        """CREATE TABLE fleet_controllers (
            host TEXT PRIMARY KEY, token INTEGER NOT NULL, pid INTEGER, process TEXT, renewed_s REAL NOT NULL)""",
    ),
    (  # 3: how long an attempt has run; names of secrets; the folder of packed code
        "ALTER TABLE fleet_attempts ADD COLUMN run_s REAL",
        "ALTER TABLE fleet_runs ADD COLUMN secrets TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE fleet_runs ADD COLUMN packed TEXT",
    ),
    (  # 4: the engine of a run's cluster
        "ALTER TABLE fleet_runs ADD COLUMN engine TEXT NOT NULL DEFAULT 'local'",
    ),
    (  # 5: nodes, see fleet/ledger: their checks and faults, and cordons; the node of an attempt
        """CREATE TABLE fleet_node_records (
            number INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, time_s REAL NOT NULL,
            kind TEXT NOT NULL, result TEXT NOT NULL, message TEXT NOT NULL,
            run INTEGER REFERENCES fleet_runs (number), source TEXT NOT NULL UNIQUE)""",
        "CREATE INDEX fleet_node_records_by_node ON fleet_node_records (node, time_s)",
        """CREATE TABLE fleet_cordons (
            number INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL, owner TEXT NOT NULL,
            by_machine INTEGER NOT NULL, reason TEXT NOT NULL, since_s REAL NOT NULL, until_s REAL,
            lifted_s REAL, lifted_by TEXT)""",
        "CREATE INDEX fleet_cordons_by_node ON fleet_cordons (node)",
        "ALTER TABLE fleet_attempts ADD COLUMN node TEXT",
    ),
    (  # 6: incidents and the messages about them, see fleet/messages
        """CREATE TABLE fleet_incidents (
            number INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL UNIQUE, time_s REAL NOT NULL,
            priority TEXT NOT NULL, type TEXT NOT NULL, node TEXT, cluster TEXT, run TEXT,
            reason TEXT NOT NULL, message TEXT NOT NULL, action TEXT NOT NULL)""",
        """CREATE TABLE fleet_outbox (
            incident INTEGER NOT NULL REFERENCES fleet_incidents (number), target TEXT NOT NULL,
            tries INTEGER NOT NULL DEFAULT 0, due_s REAL NOT NULL, pid INTEGER, process TEXT,
            sent_s REAL, given_up_s REAL, error TEXT, PRIMARY KEY (incident, target))""",
    ),
    (  # 7: the hosts that a run may be started on by ssh, as JSON
        "ALTER TABLE fleet_runs ADD COLUMN hosts TEXT",
    ),
    (  # 8: the weights of a version that are not those of its step alone
        "ALTER TABLE model_versions ADD COLUMN weights TEXT",
    ),
    (  # 9: the run of several hosts that a run is a member of
        "ALTER TABLE fleet_runs ADD COLUMN member_of INTEGER REFERENCES fleet_runs (number)",
        "CREATE INDEX fleet_runs_by_lead ON fleet_runs (member_of)",
    ),
)
"""Statements of each schema version, counted from 1 in ``PRAGMA user_version``. Append only: files of users have run
the earlier ones."""


def location() -> Path:
    """Return the path of the database, which may not exist yet."""
    return Path(env.user_folder()) / FILE_NAME


@contextmanager
def transaction(*, write: bool = True) -> Iterator[sqlite3.Connection]:
    """Open the database, creating or migrating it, and commit at the end of the block; an error rolls back.

    Without ``write`` the block sees one state and must not change it. Raises DataError where the folder or file cannot
    be written or is damaged, RetryableError where the disk is full or failing or others hold the lock for 30 s,
    UserError where a newer Smalti wrote the file.
    """
    path = location()
    with _translated(path):
        connection = _open(path)
        try:
            with _committed(connection, "BEGIN IMMEDIATE" if write else "BEGIN"):
                yield connection
        finally:
            connection.close()


@contextmanager
def _committed(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have rolled back already
            connection.execute("ROLLBACK")
        raise


def _open(path: Path) -> sqlite3.Connection:
    try:
        with writing(path.parent):
            store.make_folder(path.parent)
    except DataError as error:
        raise DataError(error.message, allowed=error.allowed, hint=_HOME_HINT) from error
    connection = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys=ON")
        version = _version(connection)
        if version == 0:
            _set_journal(connection, path)
        if version < len(MIGRATIONS):
            _migrate(connection)
        elif version > len(MIGRATIONS):
            raise UserError(
                f"{path} was written by a newer version of Smalti: its schema is {version}",
                allowed=f"schemas up to {len(MIGRATIONS)}",
                hint="pip install --upgrade smalti, or " + _HOME_HINT,
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _migrate(connection: sqlite3.Connection) -> None:
    with _committed(connection, "BEGIN IMMEDIATE"):
        # Read under the lock: another process may have migrated meanwhile.
        for statements in MIGRATIONS[_version(connection) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS)}")


def _set_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Choose the journal of a new file, which keeps it: WAL, in which readers do not wait for a writer.

    WAL needs memory shared by all processes, so not on a file system of several machines (https://sqlite.org/wal.html).
    """
    mode, end_s = "DELETE" if _is_shared(path) else "WAL", time.monotonic() + _WAIT_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode={mode}")
            return
        except sqlite3.OperationalError as error:  # SQLite does not wait here, if another process changes the mode too
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
        time.sleep(_RETRY_S)


def _is_shared(path: Path) -> bool:
    place = os.path.realpath(path.parent)
    mounts = [mount for mount in psutil.disk_partitions(all=True) if Path(place).is_relative_to(mount.mountpoint)]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return nearest is not None and nearest.fstype.lower().startswith(_NETWORK)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        translated = _from_sqlite(error, path)
        if translated is None:
            raise
        raise translated from error


def _from_sqlite(error: sqlite3.Error, path: Path) -> SmaltiError | None:
    """Return the SmaltiError of a fault of the file or disk; None for others, which are bugs."""
    kind = getattr(error, "sqlite_errorname", None) or ""
    if kind.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        return RetryableError(
            f"{path} could not be written or read: {error} ({room(path)})",
            hint="free space or repair the disk there, or " + _HOME_HINT,
        )
    if kind.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return RetryableError(
            f"{path} has been locked by another process for {_WAIT_S:.0f} s",
            hint="run the same command again when that process has ended",
        )
    if kind.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return DataError(
            f"{path} cannot be opened for writing: {error}",
            allowed="a file and folder that this user may write to",
            hint=_HOME_HINT,
        )
    if kind.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return DataError(
            f"{path} is damaged, or not a database: {error}",
            hint=f"restore it from a backup; or begin an empty one: mv {path} {path}.damaged",
        )
    return None
