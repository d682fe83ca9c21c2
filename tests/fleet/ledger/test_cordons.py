"""Cordons: those of people and of the machine, their limits and ends, and what is not started because of one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from queued import controller, fake, rounds, state, until_ended
from typer.testing import CliRunner

from smalti.base import clock, database
from smalti.base.errors import UserError
from smalti.cli.fleet import check as checking
from smalti.cli.fleet.app import app
from smalti.fleet.controller import start
from smalti.fleet.launch import slurm
from smalti.fleet.ledger import cordons, records
from smalti.fleet.queue import changes, runs

pytestmark = pytest.mark.usefixtures("home")


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, later_s: float) -> Iterator[None]:
    """So many seconds later."""
    now_s = clock.wall_s()
    with monkeypatch.context() as patch:
        patch.setattr(clock, "wall_s", lambda: now_s + later_s)
        yield


def smalti(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.stdout


def overview() -> dict[str, dict[str, Any]]:
    with database.transaction(write=False) as db:
        return {row["node"]: row for row in records.overview(db)}


def by_machine(*nodes: str, known: int = 4) -> list[str | None]:
    with database.transaction() as db:
        return [cordons.set_by_machine(db, node, "slow_products: 50%", known) for node in nodes]


def test_a_cordon_has_owner_reason_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    value = json.loads(smalti("cordon", "n1", "--reason", "fan", "--until", "2d", "--json"))
    assert (value["state"], value["cordon"]["reason"], value["cordon"]["by_machine"]) == ("cordoned", "fan", False)
    assert value["cordon"]["owner"]
    assert value["cordon"]["until_s"] - value["cordon"]["since_s"] == pytest.approx(2 * 86400)
    assert "fan" in smalti("nodes")
    with at(monkeypatch, 2 * 86400 + 1):
        assert overview()["n1"]["state"] == "unknown"


def test_off_lifts_it_and_the_ledger_keeps_it() -> None:
    smalti("cordon", "n1", "--reason", "fan")
    smalti("cordon", "n1", "--off")
    assert overview()["n1"]["cordon"] is None
    whole = json.loads(smalti("nodes", "n1", "--json"))
    assert [row["reason"] for row in whole["cordons"]] == ["fan"]
    assert whole["cordons"][0]["lifted_by"] == whole["cordons"][0]["owner"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["n1"], "without --reason"),
        (["n1", "--reason", " "], "without --reason"),
        (["n1", "--reason", "x", "--until", "soon"], "--until soon"),
        (["n1", "--off", "--reason", "x"], "--off with --reason"),
        (["n1", "--off"], "'n1' is not cordoned"),
        (["n1; rm -rf /", "--reason", "x"], "is no host name"),
    ],
)
def test_what_is_wrong_is_an_error_with_a_hint(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["cordon", *arguments])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception.message)
    assert done.exception.hint


def test_the_machine_never_undoes_a_cordon_of_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    smalti("cordon", "n1", "--reason", "fan")
    assert by_machine("n1") == [f"it is cordoned by {overview()['n1']['cordon']['owner']} already"]
    with database.transaction() as db:
        records.add_check(db, "check/1", ["n1", "n2", "n3"], [], cordon=True, is_compared=True)
    with at(monkeypatch, 30 * 86400):
        assert overview()["n1"]["cordon"]["reason"] == "fan"


def test_a_cordon_of_a_person_goes_before_the_machines_and_stays_when_that_is_lifted() -> None:
    by_machine("n1")
    smalti("cordon", "n1", "--reason", "fan")
    assert overview()["n1"]["cordon"]["reason"] == "fan"
    with database.transaction() as db:
        records.add_check(db, "check/1", ["n1", "n2", "n3"], [], cordon=True, is_compared=True)
    assert overview()["n1"]["cordon"]["reason"] == "fan"
    smalti("cordon", "n1", "--off")
    assert overview()["n1"]["cordon"] is None


def test_the_machine_cordons_two_nodes_an_hour_or_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "2 nodes were cordoned within an hour, the most that the machine may cordon"
    assert by_machine("n1", "n2", "n3", "n1") == [None, None, limit, "it is cordoned by smalti already"]
    assert by_machine("n3", known=30) == [None]
    assert by_machine("n4", known=39) == [limit.replace("2", "3")]
    smalti("cordon", "n1", "--off")
    assert by_machine("n4") == [limit]  # a lifted one counts: it may flap
    with at(monkeypatch, 3601):
        assert by_machine("n4") == [None]
    with at(monkeypatch, 86401 + 3601):
        assert not [node for node, row in overview().items() if row["cordon"]]


def finding(kind: str, *nodes: str) -> dict[str, Any]:
    return {"kind": kind, "nodes": list(nodes), "message": "m"}


def test_a_check_is_recorded_and_cordons_those_that_are_named_alone() -> None:
    result = {
        "node": 0,
        "reports": [{"node": "n1"}, {"node": "n2"}, None, {"node": "n4"}, {"node": "n5"}],
        "findings": [finding("slow_link", "n1"), finding("differs", "n2", "n4"), finding("missing", "node 2")],
    }
    assert checking.record(result, cordon=False, is_compared=False) == []
    assert {node: row["state"] for node, row in overview().items()} == {
        "n1": "unhealthy", "n2": "unhealthy", "n4": "unhealthy", "n5": "healthy",
    }  # fmt: skip
    assert checking.record(result, cordon=True, is_compared=False) == ["n1: cordoned"]
    assert overview()["n1"]["last_check"]["message"] == "slow_link: m"
    assert checking.record(result | {"node": 1}, cordon=True, is_compared=False) == []


@pytest.mark.parametrize(
    ("kind", "nodes", "is_compared", "lifts"),
    [
        ("slow_products", ["n1", "n2", "n3"], False, True),
        ("slow_products", ["n1"], True, True),
        ("slow_products", ["n1"], False, False),  # alone it is not known how fast it should be
        ("slow_link", ["n1"], True, False),  # no link was measured
    ],
)
def test_a_check_that_could_find_it_and_does_not_lifts_the_machines_cordon(
    kind: str, nodes: list[str], is_compared: bool, lifts: bool
) -> None:
    with database.transaction() as db:
        cordons.set_by_machine(db, "n1", f"{kind}: m", 4)
        records.add_check(db, "check/1", nodes, [], cordon=False, is_compared=is_compared)
    assert (overview()["n1"]["cordon"] is None) == lifts


def test_a_cordoned_machine_starts_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "ensure", lambda: None)
    first = fake(tmp_path, "first", seconds=1.0)
    control = controller()
    rounds(control, lambda: state(first).state == "RUNNING")
    smalti("cordon", runs.this_host(), "--reason", "fan")
    second = fake(tmp_path, "second")
    rounds(control, lambda: state(first).is_ended)  # what runs, continues
    for _ in range(5):
        control.round()
    assert state(first).state == "COMPLETED"
    assert state(second).state == "QUEUED"
    done = CliRunner().invoke(app, ["ls"])
    assert f"{runs.this_host()} is cordoned by" in done.stderr
    assert f"(fan) and starts no run; {second.id} waits" in done.stderr
    smalti("cordon", runs.this_host(), "--off")
    until_ended(control, second)
    assert state(second).state == "COMPLETED"
    assert overview()[runs.this_host()]["attempts"] == 2


def test_slurm_leaves_out_the_cordoned_nodes_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\nprintf 'n1 n1\\nn2 n2.lab\\ngpu3 n3\\nn1 n1\\n'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    left_out = {"n2.lab.org", "n1", "n3", "other"}
    assert slurm.without(["srun", "-n1", "x"], left_out) == ["srun", "--exclude=gpu3,n1,n2", "-n1", "x"]
    assert slurm.without(["srun", "x"], {"other"}) == ["srun", "x"]
    assert slurm.without(["srun", "x"], ()) == ["srun", "x"]


def test_changes_of_the_queue_do_not_need_the_ledger(tmp_path: Path) -> None:
    run = fake(tmp_path, "first")
    assert changes.stop(run.id).state == "STOPPED"
    assert overview() == {}
