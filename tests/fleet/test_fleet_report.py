"""The report over all runs of the queue: ends of attempts, waiting, faults inside of runs and what they cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from smalti.base import clock, database
from smalti.base.clock import seconds_of
from smalti.cli.fleet.report import text, to_json
from smalti.config.launch import LaunchConfig
from smalti.fleet import report
from smalti.fleet.queue import changes
from smalti.fleet.queue.runs import Run
from smalti.fleet.queue.schedule import Room

pytestmark = pytest.mark.usefixtures("home")

NOW = "2026-01-01T00:10:00.000Z"


def queued(name: str, events: list[tuple[int, int | None, str, str | None]], folder: Path | None = None) -> Run:
    """A run of two cores with these events (second, attempt, state, cause) and an attempt of 100 s."""
    run = changes.add(
        name, ["true"], LaunchConfig(), Room(cores=2), directory="/", folder=None if folder is None else str(folder)
    )
    with database.transaction() as db:
        db.execute("DELETE FROM fleet_events WHERE run=?", (run.number,))
        for second, attempt, state, cause in events:
            time = f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000Z"
            db.execute(
                "INSERT INTO fleet_events (run, attempt, time, state, cause, source) VALUES (?, ?, ?, ?, ?, 'user')",
                (run.number, attempt, time, state, cause),
            )
        db.execute("UPDATE fleet_runs SET state=? WHERE number=?", (events[-1][2], run.number))
        db.execute(
            "INSERT INTO fleet_attempts (run, number, nonce, gpus, started_s, ended_s) VALUES (?, 0, ?, '[]', 0, 100)",
            (run.number, name),
        )
    return run


def faulty_folder(root: Path) -> Path:
    """A run folder whose first attempt hung after 9 s, 4 s of them after its checkpoint."""
    events: list[dict[str, Any]] = [
        {"attempt": 0, "event": "attempt_started", "time": "2026-01-01T00:00:00.000Z", "ranks": 1},
        {"attempt": 0, "event": "rank_hung", "time": "2026-01-01T00:00:09.000Z", "rank": 0, "detected_s": 3.0},
        {"attempt": 0, "event": "attempt_ended", "time": "2026-01-01T00:00:10.000Z", "code": 75, "seconds": 10.0,
         "cause": "hang"},
        {"attempt": 1, "event": "attempt_started", "time": "2026-01-01T00:00:12.000Z", "ranks": 1},
        {"attempt": 1, "event": "resumed", "time": "2026-01-01T00:00:15.000Z", "step": 0},
        {"attempt": 1, "event": "run_finished", "time": "2026-01-01T00:00:20.000Z", "step": 9},
        {"attempt": 1, "event": "attempt_ended", "time": "2026-01-01T00:00:20.000Z", "code": 0, "seconds": 8.0},
    ]  # fmt: skip
    root.mkdir()
    (root / "config.yaml").write_text("name: a\n")
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for number in range(2):
        folder = root / "logs" / f"attempt-{number}"
        folder.mkdir(parents=True)
        (root if number == 0 else folder).joinpath("provenance.json").write_text('{"process": "7-a"}')
    return root


def test_an_empty_queue() -> None:
    empty = report.read()
    assert (empty.scheduling_frac, empty.device_mtbf_s) == (None, None)
    assert "smalti fleet launch RECIPE" in text(empty)


def test_money_where_a_cluster_has_a_price(tmp_path: Path, home: Path) -> None:
    queued("a", [(50, 0, "STARTING", None), (200, 0, "COMPLETED", "done")], faulty_folder(tmp_path / "a"))
    (home / "clusters.yaml").write_text("clusters: {local: {usd_per_device_hour: 3.6}}")
    result = report.read(seconds_of(NOW))
    assert result.usd == pytest.approx(3.6 * 200 / 3600)
    assert result.lost_usd == pytest.approx(3.6 * result.lost_device_s / 3600)
    assert "$0.20; lost to faults: $0.0" in text(result)


def test_ends_waiting_and_faults_are_summed(tmp_path: Path) -> None:
    folder = faulty_folder(tmp_path / "a")
    queued("a", [(0, None, "PENDING", "launched"), (30, None, "QUEUED", None), (50, 0, "STARTING", None),
                 (51, 0, "RUNNING", None), (100, 0, "RECOVERING", "fault"), (110, 1, "STARTING", None),
                 (200, 1, "COMPLETED", "done")], folder)  # fmt: skip
    queued("b", [(0, None, "QUEUED", None), (10, 0, "RUNNING", None), (20, 0, "QUEUED", "preempted"),
                 (30, None, "STOPPED", "user")])  # fmt: skip
    result = report.read(seconds_of(NOW))
    assert result.states == {"COMPLETED": 1, "STOPPED": 1}
    assert (result.ran_s, result.device_s) == (200, 400)
    assert result.waited_s == 20 + 10 + 10 + 10, "not the time until its dependencies were done"
    assert result.ends == {"fault": 1, "done": 1, "preempted": 1}
    (fault,) = result.faults
    assert (fault.cause, fault.count, result.device_mtbf_s) == ("hang", 1, 400)
    assert fault.restart_s > 0
    assert to_json(result)["faults"][0]["cause"] == "hang"
    assert (result.mtbf_s, result.usd, result.lost_usd) == (200, None, None)
    assert result.lost_s == fault.lost_s + fault.restart_s
    assert result.lost_device_s == 2 * result.lost_s
    assert "hang" in text(result)
    assert clock.utc_text() > NOW
