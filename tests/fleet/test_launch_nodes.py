"""Runs on several hosts of ssh: where members start, that they follow their run, and a host that is replaced."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_run
from network_nodes import wait_for
from ssh_hosts import Hosts, hosts, why_not
from test_launch_ssh import ENDED, Fleet, job, moves_of, starts, until
from train_process import one_rank, write_recipe
from typer.testing import CliRunner

from smalti.base import clock, database
from smalti.base.errors import UserError
from smalti.cli.fleet.app import app
from smalti.config.launch import LaunchConfig
from smalti.config.load import dump
from smalti.fleet import report
from smalti.fleet.controller import start
from smalti.fleet.controller.attempt import _arguments
from smalti.fleet.controller.decide import Job
from smalti.fleet.controller.lease import Lease
from smalti.fleet.controller.loop import Controller
from smalti.fleet.ledger import cordons, records
from smalti.fleet.messages import incidents
from smalti.fleet.queue import changes, runs, secret_values
from smalti.fleet.queue.schedule import Room

LAB = runs.Hosts(("n2", "n3", "n4"), 2, 0)


def part(number: int, *arguments: Any, **run: Any) -> Job:
    """Run 1 needs whole hosts; 2 and 3 are its members."""
    values = {"hosts": LAB, "cores": 2, "member_of": None if number == 1 else 1}
    return job(number, *arguments, **values | run)


def ended(job: Job, code: int) -> Job:
    return replace(job, attempts=(*job.attempts[:-1], replace(job.attempts[-1], ended_s=50.0, code=code)))


def move_of(*jobs: Job) -> tuple[int, str, str | None]:
    (move,) = moves_of(*jobs)
    return move.run.number, move.state, move.cause


# ---- where members start --------------------------------------------------------------------------------------------


def test_a_run_starts_on_all_of_its_hosts_at_once_or_not_at_all() -> None:
    assert starts(part(1), part(2), part(3)) == [(1, "n2", ()), (2, "n3", ()), (3, "n4", ())]
    other = job(9, "RUNNING", "n3", hosts=LAB)
    assert starts(part(1), part(2), part(3), other) == []
    assert starts(part(1), part(2), other) == [(1, "n2", ()), (2, "n4", ())]
    assert starts(part(1), part(2), part(3), job(8, hosts=LAB), cordoned=("n4",)) == [(8, "n2", ())], "never has room"


def test_members_wait_for_their_run() -> None:
    assert starts(part(1, "RECOVERING", not_before_s=101.0), part(2)) == []
    assert starts(part(1), part(2, "RECOVERING", "n3", not_before_s=9e9))[1] == (2, "n4", ()), "its wait is over"


def test_a_member_is_placed_again_on_a_host_that_its_run_has_not() -> None:
    there = [part(1, "RUNNING", "n2", cores=1), part(2, "RUNNING", "n3", cores=1)]
    assert starts(*there, part(3, "RECOVERING", "n4", cores=1)) == [(3, "n4", ())]
    assert starts(*there, part(3, "RECOVERING", "n4", cores=1), cordoned=("n4",)) == []
    assert starts(*there, part(3, "RECOVERING", "n4", cores=1, not_before_s=101.0)) == []


def test_a_member_preempts_and_who_preempts_a_member_stops_its_run() -> None:
    low = job(9, "RUNNING", "n4", hosts=LAB, priority=10, preemptible=True, cores=2)
    assert move_of(part(1, "RUNNING", "n2"), part(2, "RECOVERING", "n3"), low, job(8, "RUNNING", "n3", hosts=LAB)) == (
        9, "TERMINATING", "preempted",
    )  # fmt: skip
    gentle = {"priority": 10, "preemptible": True}
    gang = [part(1, "RUNNING", "n2", **gentle), part(2, "RUNNING", "n3", **gentle)]
    busy = job(7, "RUNNING", "n4", hosts=LAB, cores=2)
    urgent = part(6, member_of=None, priority=90)
    assert move_of(*gang, busy, urgent) == (1, "TERMINATING", "preempted")
    leaving = [part(1, "TERMINATING", "n2", **gentle), gang[1]]
    assert moves_of(*leaving, busy, urgent) == [], "both of its hosts are on their way"


# ---- members follow their run ---------------------------------------------------------------------------------------


def test_members_end_with_their_run_and_are_not_failures() -> None:
    assert move_of(part(2)) == (2, "STOPPED", "lead")
    assert move_of(part(2, "PENDING")) == (2, "STOPPED", "lead")
    assert move_of(part(2, "RUNNING", "n3")) == (2, "TERMINATING", "lead")
    for code in (0, 1, 75):
        assert move_of(ended(part(2, "RUNNING", "n3"), code)) == (2, "STOPPED", "lead")
    assert move_of(ended(part(2, "TERMINATING", "n3", cause="lead"), 143)) == (2, "STOPPED", "lead")


def test_members_are_stopped_and_wait_where_their_run_starts_again() -> None:
    again = part(1, "RECOVERING", "n2", not_before_s=101.0)
    assert move_of(again, part(2, "RUNNING", "n3")) == (2, "TERMINATING", "lead")
    assert move_of(again, ended(part(2, "TERMINATING", "n3", cause="lead"), 143)) == (2, "QUEUED", "lead")
    due = replace(again, run=replace(again.run, not_before_s=0.0))
    assert moves_of(due, part(2, "TERMINATING", "n3", cause="lead")) == [], "it starts when none of it is left"


def test_a_member_that_ends_is_started_again_without_limit_unless_the_run_is_done() -> None:
    lead = part(1, "RUNNING", "n2")
    for code, cause in ((75, "fault"), (143, "fault"), (-9, "killed"), (2, "exit_code")):
        member = ended(part(2, "RUNNING", "n3", retries=0), code)
        assert move_of(lead, member) == (2, "RECOVERING", cause)
    assert moves_of(lead, ended(part(2, "RUNNING", "n3"), 0)) == [], "the run is about to end"
    assert move_of(part(1, "QUEUED"), ended(part(2, "RUNNING", "n3"), 0)) == (2, "RECOVERING", "exit_code")


# ---- launched -------------------------------------------------------------------------------------------------------


def launch(home: Path, work: Path, *overrides: str) -> Any:
    write_recipe(work, one_rank())
    home.mkdir(exist_ok=True)
    lab = {"engine": "ssh", "hosts": ["n2", "n3"], "cores_per_host": 2}
    (home / "clusters.yaml").write_text(json.dumps({"clusters": {"lab": lab}}))
    return CliRunner().invoke(app, ["launch", "r.yaml", "--on", "lab", "--pack", "--json", *overrides])


@pytest.fixture
def launched(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> runs.Run:
    """A run of four ranks on two hosts."""
    monkeypatch.setattr(start, "ensure", lambda: None)
    monkeypatch.chdir(tmp_path)
    done = launch(home, tmp_path, "train.nodes.count=2", "ranks=4", "priority=high")
    assert done.exit_code == 0, done.output
    return runs.read(json.loads(done.stdout)["id"])


def members(run: runs.Run) -> list[runs.Run]:
    with database.transaction(write=False) as db:
        return runs.members_of(db, run.number)


def test_a_launch_queues_a_member_for_each_other_host(launched: runs.Run) -> None:
    (member,) = members(launched)
    assert (launched.cores, member.cores, member.priority, member.id) == (2, 2, 90, "t-node-2")
    port = launched.command[-1].rpartition(":")[2]
    assert launched.command[-2:] == ("{recipe}", f"train.nodes.listen={{host}}:{port}")
    assert member.command[3:] == ("fleet", "join", f"{{lead}}:{port}", "--once", "--name", "{host}")
    with database.transaction() as db:
        for number, node in ((1, "n3"), (2, "n2")):
            values = (number, 0, f"nonce{number}", "[]", node)
            db.execute("INSERT INTO fleet_attempts (run, number, nonce, gpus, node) VALUES (?, ?, ?, ?, ?)", values)
        at = [runs.attempts(db, number)[0] for number in (1, 2)]
    assert _arguments(launched, at[0])[-2:] == [f"{launched.place}/recipe.yaml", f"train.nodes.listen=n3:{port}"]
    assert _arguments(member, at[1])[5:] == [f"n3:{port}", "--once", "--name", "n2"]


def test_both_have_a_key_that_is_nowhere_else(launched: runs.Run, home: Path, tmp_path: Path) -> None:
    (member,) = members(launched)
    keys = {secret_values.values(run.group, run.secrets)["SMALTI_PEER_KEY"] for run in (launched, member)}
    (key,) = keys
    assert len(key) == 64
    files = [file for file in tmp_path.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    files += [file for file in home.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    assert set(files) == {home / "secrets" / "runs" / "1.json"}


def test_one_run_is_listed_and_its_members_change_with_it(launched: runs.Run) -> None:
    listed = json.loads(CliRunner().invoke(app, ["ls", "--json"]).stdout)
    assert [row["id"] for row in listed] == [launched.id]
    assert [row["id"] for row in listed[0]["members"]] == ["t-node-2"]
    assert "t-node-2" in CliRunner().invoke(app, ["show", launched.id]).stdout
    CliRunner().invoke(app, ["update", launched.id, "priority=low"])
    assert members(launched)[0].priority == 10
    for command in (["stop", "t-node-2", "--yes"], ["resume", "t-node-2"], ["update", "t-node-2", "priority=low"]):
        refused = CliRunner().invoke(app, command)
        assert isinstance(refused.exception, UserError)
        assert refused.exception.message == "t-node-2 is a host of t-1, and is stopped, resumed and updated with it"
    changes.stop(launched.id)
    control = control_of()
    until(lambda: not control.round())
    assert (members(launched)[0].state, members(launched)[0].cause) == ("STOPPED", "lead")
    changes.resume(launched.id)
    assert members(launched)[0].state == "PENDING"
    assert report.read().states == {"PENDING": 1}


def control_of() -> Controller:
    lease = Lease.take(runs.this_host())
    assert lease is not None
    return Controller(lease, Room(cores=1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.nodes.count=3", "ranks=3"), "train.nodes.count=3, and lab has 2 hosts"),
        (("train.nodes.count=2", "ranks=6"), "the run needs 3 cores on each host, and each host of lab has 2"),
        (("train.nodes.count=2", "ranks=3"), "cannot be divided over train.nodes.count=2"),
    ],
)
def test_a_run_that_no_hosts_can_hold_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = launch(home, tmp_path, *overrides)
    assert isinstance(refused.exception, UserError)
    assert message in refused.exception.message


# ---- a check of a member's host -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_the_failed_check_of_a_members_host_is_recorded_and_it_is_cordoned(tmp_path: Path) -> None:
    """The lead has checked both nodes in the same millisecond, and has started the ranks again without one."""
    folder = tmp_path / "r"
    folder.mkdir()
    run = changes.add(
        "r", ["/bin/sh", "-c", "sleep 600"], LaunchConfig(), Room(cores=1), directory=str(folder), folder=str(folder)
    )
    control = control_of()
    until(lambda: not control.round() and runs.read(run.id).state == "RUNNING")
    stamp = clock.utc_text()
    events: list[dict[str, Any]] = [
        {"attempt": 0, "event": "attempt_started"},
        {"attempt": 0, "event": "attempt_ended", "code": 75, "cause": "slow", "reason": "it became slow"},
        {"attempt": 0, "event": "node_checked", "node": "n3", "result": "unhealthy", "lines": ["n3: slow_link"]},
        {"attempt": 0, "event": "node_checked", "node": "n2", "result": "healthy", "lines": []},
        {"attempt": 1, "event": "attempt_started"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": stamp, **event}) + "\n" for event in events))
    until(lambda: not control.round() and bool(recorded()))
    with database.transaction(write=False) as db:
        assert set(cordons.active(db)) == {"n3"}
        assert [records.of_node(db, node)[0]["result"] for node in ("n2", "n3")] == ["healthy", "unhealthy"]
    (incident,) = recorded()
    assert (incident["type"], incident["node"], incident["run"]) == ("node cordoned", "n3", run.id)
    assert incident["action"] == "n3 is cordoned; smalti train has started the ranks again"
    changes.stop(run.id)
    until(lambda: not control.round() and runs.read(run.id).is_ended)
    for process in control._started.values():
        process.wait(20)


def recorded() -> list[dict[str, Any]]:
    with database.transaction(write=False) as db:
        return incidents.read(db)


# ---- real sshd ------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts(tmp_path_factory.mktemp("ssh"), 3) as made:
        yield made


def joins(run: str) -> list[int]:
    """The processes ``smalti fleet join`` of a run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "join" in process.cmdline() and process.environ().get("SMALTI_FLEET_RUN") == run:
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.exhaustive  # real sshd, controller, agents and training: the whole chain
def test_a_spare_that_works_takes_the_place_of_a_host_that_is_cordoned(
    three: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only real agents show that a run that lost a host continues on one that a run of low priority has left."""
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("smalti.fleet.queue.changes.this_host", lambda: "n1")
    fleet = Fleet(three, tmp_path)
    section = {"checkpoint": {"every": "20step"}, "parallel": {"ranks": 2, "threads": 1}}
    config = toy_run.config(tmp_path / "toy", duration="100step", **section)
    (tmp_path / "r.yaml").write_text(dump(config))
    low = changes.add(
        "low", ["/bin/sh", "-c", "trap 'exit 75' TERM; while :; do sleep 0.1; done"],
        LaunchConfig(priority="low", preemptible=True), Room(cores=1), directory=str(tmp_path), cluster="lab",
        engine="ssh", hosts=runs.Hosts(three.names, 1, 0, three.options),
    )  # fmt: skip
    fleet.call("launch", "r.yaml", "--on", "lab", "--pack", "train.nodes.count=2")
    run, member, folder = "dense-2", "dense-node-3", Path(config.run_folder)
    until(lambda: joins(member), 300)
    (process,) = joins(member)
    wait_for(folder / "checkpoints/latest", seconds=300)
    first, spare = (fleet.show(each)["attempts"][0]["node"] for each in (member, low.id))
    assert sorted([first, spare, fleet.show(run)["attempts"][0]["node"]]) == ["n2", "n3", "n4"]

    with database.transaction() as db:
        cordons.set_by_person(db, first, owner="me", reason="its link is slow", until_s=None)
    os.kill(process, signal.SIGKILL)
    shown = fleet.until(run, *ENDED)
    assert shown["state"] == "COMPLETED", fleet.call("logs", run)
    assert len(shown["attempts"]) == 1, "smalti train has started the ranks again"
    assert [attempt["node"] for attempt in fleet.until(member, "STOPPED")["attempts"]] == [first, spare]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["nodes"][1] for event in events if event["event"] == "attempt_started"] == [first, spare]
    fleet.until(low.id, "STARTING", "RUNNING")
    assert [attempt["code"] for attempt in fleet.show(low.id)["attempts"]] == [75, None]
    fleet.call("stop", low.id, "--yes")
    fleet.until(low.id, *ENDED)
