"""Messages: one for each incident and receiver, from a real outbox to a real server that fails sometimes."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import receiver as receiving
from receiver import Receiver
from typer.testing import CliRunner

from smalti.base import clock, database
from smalti.base.errors import CheckFailed, UserError
from smalti.cli.fleet import check as checking
from smalti.cli.fleet.app import app
from smalti.fleet.messages import incidents, outbox
from smalti.fleet.messages.incidents import Incident
from smalti.fleet.queue import secret_values

pytestmark = pytest.mark.usefixtures("home")
CRITICAL = Incident(
    "demo-1/0", "critical", "node cordoned", "slow_link", "all-reduce with 3 of 3 partners: <25 MB/s>",
    "n3 is cordoned; demo-1 is queued again, as attempt 1", "n3", "big", "demo-1",
)  # fmt: skip


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with receiving.webhook() as made:
        secret_values.store("HOOK", made.url + "\n")
        yield made


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_FIRST_WAIT_S", 0.0)


def configure(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "fleet.yaml").write_text(text)


def add(*sources: str, priority: Any = "critical") -> None:
    with database.transaction() as db:
        for source in sources:
            incidents.add(db, Incident(source, priority, "run failed", "error", "m", "none", "n1", "local", source))


def outcome() -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["messages", "--json"])
    assert done.exit_code == 0
    return list(json.loads(done.stdout))


def test_a_message_has_the_fields_of_the_incident(home: Path, hook: Receiver) -> None:
    configure(home, "messages: {ops: {url: HOOK}, chat: {url: HOOK, format: slack}}")
    with database.transaction() as db:
        assert incidents.add(db, CRITICAL)
        assert not incidents.add(db, CRITICAL)
    assert outbox.deliver() == 2
    as_json = next(body for body in hook.bodies if "id" in body)
    assert {
        name: as_json[name] for name in ("priority", "type", "node", "cluster", "run", "reason", "message", "action")
    } == {
        name: getattr(CRITICAL, name)
        for name in ("priority", "type", "node", "cluster", "run", "reason", "message", "action")
    }
    assert as_json["id"] in hook.keys
    (slack,) = [body for body in hook.bodies if "id" not in body]
    assert slack["text"].splitlines() == [
        "*Node cordoned: node n3 on cluster big*", "*Priority*: Critical", "*Run*: demo-1", "*Reason*: slow_link",
        "*Message*: all-reduce with 3 of 3 partners: &lt;25 MB/s&gt;",
        "*Action taken*: n3 is cordoned; demo-1 is queued again, as attempt 1",
    ]  # fmt: skip
    assert outbox.deliver() == 0


def test_a_server_that_fails_gets_it_again_and_the_url_is_nowhere(
    home: Path, hook: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    configure(home, "messages: {ops: {url: HOOK}}")
    hook.refuse = [500, 0, 302, 429]
    add("a-1/0")
    with caplog.at_level(logging.DEBUG):
        for _ in range(5):
            outbox.deliver()
    assert [body["run"] for body in hook.bodies] == ["a-1/0"]
    (row,) = outcome()
    (message,) = row["messages"]
    assert (message["tries"], message["error"]) == (5, None)
    assert "the server answered 500" in caplog.text
    files = [file.read_bytes() for file in home.rglob("*") if file.is_file() and "secrets" not in file.parts]
    assert all(b"CANARY" not in content for content in [*files, caplog.text.encode()])


@pytest.mark.parametrize(
    ("value", "error"),
    [(None, "the secret HOOK is not stored"), ("ftp://CANARY", "is no URL"), ("http://127.0.0.1:1/CANARY", "reached"),
     ("http://CANARY host/", "InvalidURL")],
)  # fmt: skip
def test_an_error_is_kept_without_the_url(home: Path, value: str | None, error: str) -> None:
    configure(home, "messages: {ops: {url: HOOK}}")
    if value is not None:
        secret_values.store("HOOK", value)
    add("a-1/0")
    outbox.deliver()
    text = outcome()[0]["messages"][0]["error"]
    assert error in text
    assert "CANARY" not in text


def test_a_receiver_gets_what_is_important_enough(home: Path, hook: Receiver) -> None:
    configure(home, "messages: {ops: {url: HOOK, at_least: high}}")
    add("a-1/0", priority="normal")
    add("b-2/0", priority="high")
    outbox.deliver()
    assert [body["run"] for body in hook.bodies] == ["b-2/0"]
    assert [(row["source"], len(row["messages"])) for row in outcome()] == [("a-1/0", 0), ("b-2/0", 1)]


def test_it_is_given_up_after_a_day(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(home, "messages: {gone: {url: HOOK}}")
    add("a-1/0")
    now_s = clock.wall_s()
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + 86401)
    outbox.deliver()
    assert outcome()[0]["messages"][0]["given_up_s"] is not None
    assert outbox.deliver() == 0
    assert "given up" in CliRunner().invoke(app, ["messages"]).stdout


def test_mail(home: Path) -> None:
    with receiving.mail_server() as server:
        mail = f"{{host: 127.0.0.1, port: {server.port}, encryption: none, sender: s@x.org, to: [a@x.org, b@x.org]}}"
        configure(home, f"messages: {{ops: {{email: {mail}}}}}")
        server.refuse = [451]
        with database.transaction() as db:
            incidents.add(db, CRITICAL)
        outbox.deliver()
        assert outcome()[0]["messages"][0]["error"] == "the mail server answered 451"
        outbox.deliver()
    (text,) = server.mails
    for line in ("Subject: [smalti] Critical: Node cordoned: node n3 on cluster big", "To: a@x.org, b@x.org",
                 "Action taken: n3 is cordoned; demo-1 is queued again, as attempt 1"):  # fmt: skip
        assert line in text.replace("\r\n ", " ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("messages: {a: {}}", "url and email"),
        ("messages: {a: {url: 'https://hooks.example/T/B'}}", "url"),
        ("messages: {a: {url: HOOK, format: xml}}", "xml"),
        ("mesages: {}", "mesages"),
    ],
)
def test_what_is_wrong_in_the_file_is_an_error(home: Path, text: str, message: str) -> None:
    configure(home, text)
    with pytest.raises(UserError, match=message):
        incidents.fleet_config()


def test_an_incident_is_recorded_although_the_file_is_wrong(home: Path) -> None:
    configure(home, "mesages: {}")
    add("a-1/0")
    assert [row["source"] for row in outcome()] == ["a-1/0"]


def test_a_test_message(home: Path, hook: Receiver) -> None:
    configure(home, "messages: {ops: {url: HOOK}}")
    assert CliRunner().invoke(app, ["messages", "--test"]).stdout == "ops: accepted\n"
    hook.refuse = [403]
    done = CliRunner().invoke(app, ["messages", "--test"])
    assert done.stdout == "ops: the server answered 403\n"
    assert isinstance(done.exception, CheckFailed)
    assert len(hook.bodies) == 1


def test_a_check_that_cordons_sends_a_message_for_each_node(home: Path, hook: Receiver) -> None:
    configure(home, "messages: {ops: {url: HOOK}}")
    finding = {"kind": "slow_link", "message": "25 MB/s"}
    result = {
        "node": 0,
        "reports": [{"node": name} for name in ("n1", "n2", "n3", "n4")],
        "findings": [finding | {"nodes": [name]} for name in ("n1", "n2", "n3")],
    }
    checking.record(result, cordon=False, is_compared=False)
    assert hook.bodies == []
    checking.record(result, cordon=True, is_compared=False)
    found = {(body["node"], body["type"], body["action"]) for body in hook.bodies}
    limit = "not cordoned: 2 nodes were cordoned within an hour, the most that the machine may cordon"
    assert found == {
        ("n1", "node cordoned", "n1: cordoned"),
        ("n2", "node cordoned", "n2: cordoned"),
        ("n3", "node failed its check", f"n3: {limit}"),
    }


KILLED = """
import os, random, sys, threading, time
from smalti.fleet.messages import outbox
outbox._FIRST_WAIT_S = 0.0
draw = random.Random(int(sys.argv[1]))
def kill():
    time.sleep(draw.uniform(0.0, 0.15))
    os.kill(os.getpid(), 9)
threading.Thread(target=kill, daemon=True).start()
while True:
    outbox.deliver()
"""


@pytest.mark.slow
def test_messages_of_killed_senders_are_neither_lost_nor_new_ones(home: Path, hook: Receiver, proof: Any) -> None:
    """Real processes that are killed at random instants, beside a server that refuses a third of the requests.

    A process that is killed between the server's answer and its record sends the message again, with the same id.
    """
    configure(home, "messages: {ops: {url: HOOK}}")
    kills, draw = proof(short=6, full=60), random.Random(4)
    hook.refuse = [draw.choice([200, 200, 500]) for _ in range(10 * kills)]
    add(*(f"r-{number}/0" for number in range(4 * kills)))
    for number in range(kills):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(number)], timeout=60, env=dict(os.environ), check=False
        )
        assert done.returncode == -signal.SIGKILL
    end_s = time.monotonic() + 60
    while any(message["sent_s"] is None for row in outcome() for message in row["messages"]):
        outbox.deliver()
        assert time.monotonic() < end_s
    ids = Counter(body["id"] for body in hook.bodies)
    assert len(ids) == 4 * kills
    assert len({body["run"] for body in hook.bodies}) == 4 * kills
    again = sum(ids.values()) - len(ids)
    print(f"{kills} kills, {4 * kills} messages, {again} sent again")
    assert again <= kills
