"""The agent of a node that has joined, with a connection in place of a lead."""

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from smalti.base.errors import UserError
from smalti.cli.fleet.app import join
from smalti.config.nodes import NodesConfig
from smalti.fleet.neighbour import stream
from smalti.fleet.nodes import joined


class Joined:
    """A session, whose lead is ``lead``."""

    def __init__(self) -> None:
        ours, self.lead = Pipe()
        self.requests = SimpleNamespace(any=False, interrupts=0, terminations=0)
        self.session = joined._Session(ours, 100.0, self.requests, None)  # type: ignore[arg-type]
        self.codes: list[int | None] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(self.session.run()), daemon=True)

    def receive(self) -> stream.Message:
        assert self.lead.poll(100), "no report"
        return stream.receive_message(self.lead)

    def end(self) -> None:
        stream.send_message(self.lead, {"do": "end", "code": 3})
        self.thread.join(100)
        assert self.codes == [3]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    monkeypatch.setattr(joined, "BEAT_S", 0.1)
    made = Joined()
    yield made
    made.session.close()


def test_a_run_folder_that_does_not_answer_does_not_delay_reports(made: Joined, tmp_path: Path) -> None:
    file = tmp_path / "slots"
    os.mkfifo(file)  # a read waits for a writer
    made.session._slots_file = file
    made.thread.start()
    for _ in range(5):
        assert made.receive()["slots"] == ""
    with open(file, "wb") as writer:
        writer.write(b"abc")
    while made.receive()["slots"] != "YWJj":
        pass
    made.end()


def test_what_has_not_changed_of_the_copies_is_sent_once(made: Joined) -> None:
    copies = SimpleNamespace(
        last_job=0, report=lambda: {"files": {"step-1": ["a"]}, "job": copies.last_job, "failure": None}
    )
    made.session._copies = copies  # type: ignore[assignment]
    made.thread.start()
    assert made.receive()["copies"] == {"files": {"step-1": ["a"]}, "job": 0, "failure": None}
    assert made.receive()["copies"] == {}
    copies.last_job = 1
    while not (changed := made.receive()["copies"]):
        pass
    assert changed == {"job": 1}
    made.end()


def test_a_spare_that_leaves_reports_it(made: Joined) -> None:
    made.thread.start()
    assert made.receive()["leaves"] is False
    made.requests.any, made.requests.terminations = True, 1
    while not made.receive()["leaves"]:
        pass
    made.thread.join(100)
    assert made.codes == [None]


@pytest.mark.parametrize(
    "address", ["n1", "n1:0", "n1:65536", "n1:99999", "::1:7400", "[::1]:7400", ":7400", "0.0.0.0:1"]
)
def test_an_address_that_no_lead_can_have_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="is not the address of a lead") as raised:
        join([address])
    assert raised.value.allowed == "HOST:PORT, a name or IPv4 address, and a port of 1 to 65535"
    with pytest.raises(ValueError, match="is not an address at which other nodes reach this one"):
        NodesConfig(count=2, listen=address)
