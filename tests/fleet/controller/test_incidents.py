"""One incident for each fault, from the events of a run and the moves of the queue, with what was done."""

import json
from pathlib import Path
from typing import Any

import pytest
import receiver as receiving
from queued import rounds, state, until_ended

from smalti.base import database
from smalti.config.launch import LaunchConfig
from smalti.fleet.controller import run_events
from smalti.fleet.controller.lease import Lease
from smalti.fleet.controller.loop import Controller
from smalti.fleet.messages import incidents
from smalti.fleet.queue import changes, runs, secret_values
from smalti.fleet.queue.runs import Run
from smalti.fleet.queue.schedule import Room

pytestmark = pytest.mark.usefixtures("home")
HOST = runs.this_host()

SCRIPT = """
import json, os, sys, time
from datetime import UTC, datetime
attempts = json.load(open("attempts.json"))
mine = attempts.pop(0)
json.dump(attempts, open("attempts.json", "w"))
for event in mine["events"]:
    time.sleep(event.pop("after_s", 0.0))
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    with open("events.jsonl", "a") as file:
        file.write(json.dumps({"time": stamp, **event}) + chr(10))
sys.exit(mine["code"])
"""


def queued(folder: Path, *attempts: dict[str, Any], **launch: Any) -> Run:
    """A run whose attempts write these events and end with these codes."""
    folder.mkdir(parents=True)
    (folder / "attempts.json").write_text(json.dumps(attempts))
    command = ["python3", "-c", SCRIPT]
    settings = LaunchConfig.model_validate(launch)
    return changes.add("r", command, settings, Room(cores=1), directory=str(folder), folder=str(folder))


def attempt(
    number: int, code: int = 75, cause: str | None = "killed", checked: str | None = None
) -> list[dict[str, Any]]:
    """The events of an attempt of ``smalti train``."""
    why = {} if cause is None else {"cause": cause}
    events: list[dict[str, Any]] = [{"event": "attempt_started"}]
    if cause == "killed":
        events.append({"event": "rank_died", "rank": 1, "signal": "SIGKILL"})
    events.append({"event": "attempt_ended", "code": code, "reason": f"rank 1 was killed in {number}", **why})
    if checked is not None:
        events.append(
            {"event": "node_checked", "node": HOST, "result": checked, "lines": [f"{HOST}: slow_link: 25 MB/s"]}
        )
    return [{"attempt": number, **event} for event in events]


def control() -> Controller:
    lease = Lease.take(HOST)
    assert lease is not None
    return Controller(lease, Room(cores=2))


def recorded() -> list[tuple[str, str, str, str]]:
    with database.transaction(write=False) as db:
        return [(row["source"], row["type"], row["reason"], row["action"]) for row in incidents.read(db)]


def test_a_fault_that_smalti_train_overcomes_is_one_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "_EVERY_S", 0.0)
    run = queued(tmp_path / "r", {"events": attempt(0) + attempt(1, 0, None), "code": 0})
    until_ended(control(), run)
    assert recorded() == [(f"{run.id}/0", "ranks restarted", "killed", "smalti train has started the ranks again")]


def test_a_fault_that_ends_the_command_is_one_incident_although_its_events_are_read_again(tmp_path: Path) -> None:
    run = queued(
        tmp_path / "r", {"events": attempt(0), "code": 75}, {"events": attempt(1, 0, None), "code": 0},
    )  # fmt: skip
    first = control()
    rounds(first, lambda: state(run).state == "RECOVERING")
    with database.transaction() as db:  # as if it had been killed
        db.execute("UPDATE fleet_controllers SET pid=NULL")
    until_ended(control(), run)
    for process in first._started.values():
        process.wait(20)
    assert recorded() == [(f"{run.id}/0", "run restarted", "killed", f"{run.id} is queued again, as attempt 1")]


def test_an_attempt_that_recorded_nothing_is_an_incident_of_its_own(tmp_path: Path) -> None:
    run = queued(
        tmp_path / "r", {"events": attempt(0), "code": 75}, {"events": [], "code": 75}, {"events": [], "code": 1},
    )  # fmt: skip
    until_ended(control(), run)
    assert [row[:3] for row in recorded()] == [
        (f"{run.id}/0", "run restarted", "killed"),
        (f"{run.id}/queue-1", "run restarted", "fault"),
        (f"{run.id}/queue-2", "run failed", "error"),
    ]


def test_a_stop_a_pause_and_a_dependency_are_no_incidents(tmp_path: Path) -> None:
    slow = attempt(0, 75, "slow", "healthy") + attempt(1, 0, None)
    run = queued(tmp_path / "r", {"events": slow, "code": 0})
    stopped = queued(tmp_path / "s", {"events": [], "code": 1})
    after = changes.add(
        "after", ["true"], LaunchConfig(depends_on=(stopped.id,)), Room(cores=1), directory=str(tmp_path)
    )
    changes.stop(stopped.id)
    until_ended(control(), run, stopped, after)
    assert state(after).cause == "dependency"
    assert recorded() == []


def test_a_node_that_failed_its_check_one_message_with_what_was_done(home: Path, tmp_path: Path) -> None:
    """The whole chain of a queue: the check fails, the node is cordoned, the run waits, one message is sent."""
    with receiving.webhook() as hook:
        secret_values.store("HOOK", hook.url)
        (home / "fleet.yaml").write_text("messages: {ops: {url: HOOK}}")
        hook.refuse = [503]
        run = queued(tmp_path / "r", {"events": attempt(0, checked="unhealthy"), "code": 75}, {"events": [], "code": 0})
        first = control()
        rounds(first, lambda: state(run).state == "RECOVERING")
        for _ in range(10):
            first.round()
        assert state(run).state == "RECOVERING"
        with database.transaction() as db:
            db.execute("UPDATE fleet_cordons SET until_s=0")
            db.execute("UPDATE fleet_runs SET not_before_s=0")
            db.execute("UPDATE fleet_controllers SET pid=NULL")
        second = control()
        second.run()  # sends what waits, and ends
        for process in (*first._started.values(), *second._started.values()):
            process.wait(20)
    (body,) = hook.bodies
    action = f"{HOST} is cordoned; {run.id} is queued again, as attempt 1"
    message = f"rank 1 was killed in 0; {HOST}: slow_link: 25 MB/s"
    assert (body["type"], body["priority"], body["node"]) == ("node cordoned", "critical", HOST)
    assert (body["reason"], body["message"], body["action"]) == ("killed", message, action)
    assert state(run).state == "COMPLETED"
