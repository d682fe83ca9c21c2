"""The database of SMALTI_HOME: transactions, migrations, several processes, and faults of file and disk."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from smalti.base import database
from smalti.base.errors import DataError, RetryableError, UserError

pytestmark = pytest.mark.usefixtures("home")


def insert(name: str) -> None:
    with database.transaction() as db:
        db.execute("INSERT INTO models VALUES (?, 0)", (name,))


def names() -> list[str]:
    with database.transaction(write=False) as db:
        return [row["name"] for row in db.execute("SELECT name FROM models ORDER BY name")]


def test_a_transaction_is_applied_whole_or_not_at_all(home: Path) -> None:
    insert("a")
    with suppress(ZeroDivisionError), database.transaction() as db:
        db.execute("INSERT INTO models VALUES ('b', 0)")
        raise ZeroDivisionError
    assert names() == ["a"]
    assert (home / "smalti.db").exists()


def test_a_write_does_not_stop_a_reader() -> None:
    insert("a")
    with database.transaction() as db:
        db.execute("INSERT INTO models VALUES ('b', 0)")
        assert names() == ["a"]


def test_migrations_run_once_and_keep_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    insert("a")
    later = ("ALTER TABLE models ADD COLUMN note TEXT", "UPDATE models SET note='before'")
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, later))
    for _ in range(2):
        with database.transaction(write=False) as db:
            assert [tuple(row) for row in db.execute("SELECT * FROM models")] == [("a", 0, "before")]


def test_a_migration_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    insert("a")
    usual = database.MIGRATIONS
    monkeypatch.setattr(database, "MIGRATIONS", (*usual, ("ALTER TABLE models ADD COLUMN note TEXT", "NONSENSE")))
    with pytest.raises(sqlite3.OperationalError):
        names()
    monkeypatch.setattr(database, "MIGRATIONS", usual)
    assert names() == ["a"]


def test_a_file_of_a_newer_version_is_an_error_and_stays(home: Path) -> None:
    insert("a")
    with sqlite3.connect(home / "smalti.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(UserError, match="written by a newer version of Smalti: its schema is 99") as caught:
        insert("b")
    assert "pip install --upgrade smalti" in str(caught.value.hint)
    with sqlite3.connect(home / "smalti.db") as db:
        assert db.execute("SELECT count(*) FROM models").fetchone() == (1,)
    db.close()


MANY = """
import sys, time
from pathlib import Path
from smalti.base import database
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
for number in range(10):
    with database.transaction() as db:
        before = db.execute("SELECT coalesce(max(last_version), 0) FROM models").fetchone()[0]
        db.execute("INSERT INTO models VALUES (?, ?)", (f"{sys.argv[1]}-{number}", before + 1))
"""


def test_processes_that_begin_at_once_on_an_empty_folder(tmp_path: Path) -> None:
    """The file is created, switched to WAL and migrated by one of them; no update of another is lost."""
    started = [
        subprocess.Popen([sys.executable, "-c", MANY, str(number), str(tmp_path / "go")], stderr=subprocess.PIPE)
        for number in range(4)
    ]
    (tmp_path / "go").touch()
    for process in started:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    with database.transaction(write=False) as db:
        assert [row[0] for row in db.execute("SELECT last_version FROM models ORDER BY 1")] == list(range(1, 41))
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_no_wal_where_several_machines_share_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_NETWORK", ("",))
    insert("a")
    with database.transaction(write=False) as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "delete"


def test_a_lock_that_is_not_released_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    insert("a")
    monkeypatch.setattr(database, "_WAIT_S", 0.05)
    with database.transaction(), pytest.raises(RetryableError, match="locked by another process"):
        insert("b")


def test_what_is_no_database(home: Path) -> None:
    home.mkdir()
    (home / "smalti.db").write_text("not a database " * 100)
    with pytest.raises(DataError, match="damaged, or not a database") as caught:
        insert("a")
    assert f"mv {home}/smalti.db" in str(caught.value.hint)
    (home / "smalti.db").unlink()
    (home / "smalti.db").mkdir()
    with pytest.raises(DataError, match="cannot be opened for writing"):
        insert("a")


def test_a_place_that_takes_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALTI_HOME", "/proc/smalti")
    with pytest.raises(DataError, match="/proc/smalti") as caught:
        insert("a")
    assert "export SMALTI_HOME=FOLDER" in str(caught.value.hint)


@pytest.fixture
def disk(home: Path) -> Iterator[Path]:
    """The folder is a disk of 512 KiB."""
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(home)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here (it needs root)")
    yield home
    subprocess.run(["umount", str(home)], check=True)


def test_a_full_disk_and_a_read_only_one(disk: Path) -> None:

    def fill() -> None:
        for number in range(10_000):
            insert(f"{number:0500d}")

    with pytest.raises(RetryableError, match="could not be written") as caught:
        fill()
    assert f"the disk at {disk} has" in caught.value.message
    subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
    insert("after")
    written = names()
    assert len(written) > 100
    assert written == [*(f"{number:0500d}" for number in range(len(written) - 1)), "after"]
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(DataError, match=f"{disk}/smalti.db cannot be opened for writing"):
        insert("b")
