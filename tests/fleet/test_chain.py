"""The whole chain without a person: a link of a running job becomes slow, and the job continues elsewhere."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_run
from forked_command import start
from made_checkpoints import digests
from ssh_hosts import Hosts, hosts, why_not
from test_launch_ssh import ENDED, Fleet, until

from smalti.base import database
from smalti.config.launch import LaunchConfig
from smalti.config.load import dump
from smalti.fleet.ledger import cordons, records
from smalti.fleet.queue import changes, runs, secret_values
from smalti.fleet.queue.schedule import Room

STEPS = 150
_HOOK = """
import http.server, sys
class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open(sys.argv[1], "ab") as file:
            file.write(body + b"\\n")
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", 8080), Receiver).serve_forever()
"""


@pytest.fixture
def five(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = why_not() or (None if shutil.which("tc") else "needs iproute2 (tc)")
    if reason is not None:
        pytest.skip(reason)
    with hosts(tmp_path_factory.mktemp("ssh"), 5) as made:
        yield made


def _recipe(root: Path, **train: Any) -> tuple[Path, Path]:
    section = {"checkpoint": {"every": "50step"}, "parallel": {"ranks": 4, "threads": 1}, **train}
    config = toy_run.config(root, duration=f"{STEPS}step", log_every="1step", **section)
    (root / "r.yaml").write_text(dump(config))
    return root / "r.yaml", Path(config.run_folder)


def _shards(folder: Path) -> dict[str, str]:
    files = digests(folder / f"checkpoints/step-{STEPS:08d}")
    return {name: digest for name, digest in files.items() if name.startswith("shards/")}


@pytest.mark.slow
@pytest.mark.exhaustive  # real sshd, controller, agents, checks and training on five nodes
def test_a_link_becomes_slow_and_the_run_goes_on_on_a_host_that_a_run_of_low_priority_leaves(
    five: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only all parts together show that nobody is needed: MFU falls, the check names the host, it is cordoned, the
    spare is freed, the run resumes there, and one message says so."""
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("smalti.fleet.queue.changes.this_host", lambda: "n1")
    fleet, messages = Fleet(five, tmp_path), tmp_path / "messages"
    five.nodes.start("n1", [sys.executable, "-c", _HOOK, str(messages)])
    secret_values.store("HOOK", "http://127.0.0.1:8080/")
    (tmp_path / "home/fleet.yaml").write_text("messages: {ops: {url: HOOK}}")
    low = changes.add(
        "low", ["/bin/sh", "-c", "trap 'exit 75' TERM; while :; do sleep 0.1; done"],
        LaunchConfig(priority="low", preemptible=True), Room(cores=1), directory=str(tmp_path), cluster="lab",
        engine="ssh", hosts=runs.Hosts(five.names, 1, 0, five.options),
    )  # fmt: skip
    check = f"{sys.executable} -m smalti fleet check --own --folder {tmp_path}"
    recipe, folder = _recipe(tmp_path / "toy", health={"command": check, "mfu_below": 0.6})
    fleet.call("launch", str(recipe), "--on", "lab", "--pack", "train.nodes.count=4")

    def events(kind: str) -> list[dict[str, Any]]:
        file = folder / "events.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if line["event"] == kind]

    until(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").read_text().count("\n") > 80, 300)
    began_s, (first,) = time.monotonic(), [event["nodes"] for event in events("attempt_started")]
    slow, (spare,) = first[2], set(five.names) - set(first)
    with five.nodes.slowed(slow, "8mbit"):
        shown = fleet.until("dense-2", *ENDED)
    print(f"{time.monotonic() - began_s:.0f} s from the slow link to the end of the run")
    assert shown["state"] == "COMPLETED", fleet.call("logs", "dense-2")
    assert len(shown["attempts"]) == 1, "smalti train has started the ranks again"
    _, second = [set(event["nodes"]) for event in events("attempt_started")]
    assert second == {*first, spare} - {slow}
    assert {event["node"]: event["result"] for event in events("node_checked")} == {
        node: "unhealthy" if node == slow else "healthy" for node in first
    }
    (paused, _), (resumed,) = events("attempt_ended"), events("resumed")
    assert (paused["cause"], resumed["step"]) == ("slow", paused["step"]), "no step is lost"
    with database.transaction(write=False) as db:
        assert set(cordons.active(db)) == {slow}
        assert records.of_node(db, slow)[0]["result"] == "unhealthy"
    until(messages.exists, 60)
    (message,) = [json.loads(line) for line in messages.read_text().splitlines()]
    assert (message["type"], message["node"], message["run"]) == ("node cordoned", slow, "dense-2")
    fleet.until(low.id, "STARTING", "RUNNING")
    assert [attempt["code"] for attempt in fleet.show(low.id)["attempts"]] == [75, None]
    fleet.call("stop", low.id, "--yes")
    fleet.until(low.id, *ENDED)
    undisturbed, alone = _recipe(tmp_path / "alone")
    code, output = start("train", str(undisturbed)).finish(600)
    assert code == 0, output
    assert _shards(folder) == _shards(alone)
