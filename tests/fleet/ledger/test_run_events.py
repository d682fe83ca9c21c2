"""The controller records checks and faults of runs in the ledger of their nodes, each once, even if it was killed."""

from pathlib import Path
from typing import Any

import pytest
from queued import rounds, state, until_ended

from smalti.base import clock, database
from smalti.config.launch import LaunchConfig
from smalti.fleet.controller import run_events
from smalti.fleet.controller.lease import Lease
from smalti.fleet.controller.loop import Controller
from smalti.fleet.ledger import records
from smalti.fleet.queue import changes, runs
from smalti.fleet.queue.runs import Run
from smalti.fleet.queue.schedule import Room
from smalti.track.events import EventLog

pytestmark = pytest.mark.usefixtures("home")
HOST = runs.this_host()


def control() -> Controller:
    lease = Lease.take(HOST)
    assert lease is not None
    return Controller(lease, Room(cores=2))


def training(folder: Path, seconds: float = 0.3) -> Run:
    """A queued run with a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["/bin/sh", "-c", f"sleep {seconds}"]
    return changes.add("r", command, LaunchConfig(), Room(cores=1), directory=str(folder.parent), folder=str(folder))


def write(folder: Path, kind: str, **fields: Any) -> None:
    log = EventLog(folder)
    log.write(kind, **fields)
    log.close()


def ledger(node: str = HOST) -> list[tuple[str, str]]:
    with database.transaction(write=False) as db:
        return [(record["kind"], record["result"]) for record in reversed(records.of_node(db, node))]


def cordoned() -> bool:
    with database.transaction(write=False) as db:
        return any(row["cordon"] for row in records.overview(db))


def test_faults_and_checks_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "_EVERY_S", 0.0)
    folder = tmp_path / "runs" / "r"
    run = training(folder, seconds=1.0)
    first = control()
    rounds(first, lambda: state(run).state == "RUNNING")
    write(folder, "rank_died", rank=1, signal="SIGKILL")
    write(folder, "checkpoint_saved", step=3)
    write(folder, "node_checked", node=HOST, result="healthy", lines=[])
    rounds(first, lambda: len(ledger()) == 2)
    first._lease.release_if_idle()
    with database.transaction() as db:  # as if it had been killed
        db.execute("UPDATE fleet_controllers SET pid=NULL")
    second = control()
    write(folder, "rank_died", rank=0, code=1)
    until_ended(second, run)
    for process in first._started.values():
        process.wait(20)
    assert ledger() == [("fault", "rank_died"), ("check", "healthy"), ("fault", "rank_died")]
    with database.transaction(write=False) as db:
        message = records.of_node(db, HOST)[-1]["message"]
    assert message == f"rank 1 of {run.id}: SIGKILL"
    assert not cordoned()


def test_events_at_the_very_end_and_none_of_earlier_runs_are_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    old = '{"time": "2020-01-01T00:00:00.000Z", "attempt": 0, "event": "rank_died", "rank": 0, "code": 1}\n'
    (folder / "events.jsonl").write_text(old)
    line = old.replace('"rank": 0', '"rank": 7').strip()
    now = "$(date -u +%Y-%m-%dT%H:%M:%S.%3NZ)"
    script = f"sleep 0.2; echo '{line}' | sed s/2020-01-01T00:00:00.000Z/{now}/ >> events.jsonl"
    run = changes.add(
        "r", ["/bin/sh", "-c", script], LaunchConfig(), Room(cores=1), directory=str(folder), folder=str(folder)
    )
    until_ended(control(), run)
    assert ledger() == [("fault", "rank_died")]


def test_a_node_whose_check_failed_is_cordoned(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    run, controls = training(folder, seconds=1.0), control()
    rounds(controls, lambda: state(run).state == "RUNNING")
    write(folder, "node_checked", node="n7", result="unhealthy", lines=["n7: slow_products: 50%"], rank=None)
    until_ended(controls, run)
    with database.transaction(write=False) as db:
        (row,) = [row for row in records.overview(db) if row["node"] == "n7"]
    assert row["cordon"]["by_machine"]
    assert row["cordon"]["reason"] == f"the check of {run.id} failed: n7: slow_products: 50%"


def test_a_fault_of_a_rank_on_another_node_is_that_nodes(tmp_path: Path) -> None:
    run = training(tmp_path / "runs" / "r")
    with database.transaction() as db:
        for event in ({"event": "rank_died", "rank": 3, "node": "n7", "code": 1}, {"event": "node_lost", "node": "n8"}):
            records.add_event(db, run, HOST, {**event, "time": clock.utc_text(), "attempt": 0})
    assert ledger("n7") == [("fault", "rank_died")]
    assert ledger("n8") == [("fault", "node_lost")]
    assert ledger() == []


def test_an_old_check_cordons_nothing(tmp_path: Path) -> None:
    run = training(tmp_path / "runs" / "r")
    event = {"event": "node_checked", "node": "n7", "result": "unhealthy", "time": "2026-01-01T00:00:00.000Z"}
    with database.transaction() as db:
        assert records.add_event(db, run, HOST, event) is None
        assert records.add_event(db, run, None, {**event, "event": "rank_died", "node": None}) is None
    assert ledger("n7") == [("check", "unhealthy")]
    assert not cordoned()


def test_a_run_folder_that_cannot_be_read_does_not_stop_the_controller(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    (folder / "events.jsonl").mkdir(parents=True)
    run = training(folder)
    until_ended(control(), run)
    assert state(run).state == "COMPLETED"
